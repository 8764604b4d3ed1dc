"""A real federation on Flower's deployment engine: keys and configuration, and a run on one host.

Needs the extra: pip install 'fedgft[flower]'.
"""
