from fedgft.cli import main

main()
