"""Enter the benchmark with a model that is not ours: scikit-learn on the pooled training rows.

A track gives, for each of its seeds, training rows, inner rows to choose settings with, and test
rows. A submission is a table with one score per test row. You see accuracy and gaps of a logistic
regression on the track compas-race, as `fedgft bench score submission.csv` prints them.
"""

import numpy as np
import polars as pl
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedgft.bench import get_track, read_submission, score_submission

STRENGTHS = (0.001, 0.01, 0.1, 1.0)

track = get_track("compas-race")
data = track.load()
tables = []
for seed in range(track.seeds):
    split = track.split(seed)
    train, inner, test = split.federation.rows, split.inner, split.federation.test
    models = [make_pipeline(StandardScaler(), LogisticRegression(C=c)) for c in STRENGTHS]
    for model in models:
        model.fit(data.features[train], data.labels[train])
    right = [model.score(data.features[inner], data.labels[inner]) for model in models]
    best = models[int(np.argmax(right))]  # chosen on inner rows, never on test rows
    scores = best.predict_proba(data.features[test])[:, 1]
    table = {"track": track.name, "version": track.version, "seed": seed}
    tables.append(pl.DataFrame({**table, "row": test, "score": scores}))

pl.concat(tables).write_csv("submission.csv")
score = score_submission(read_submission("submission.csv"))[0].summarize()
for name, each in score["metrics"].items():
    print(f"{name}: accuracy {score['accuracy']:.3f}, gap {each['gap']:.3f}")
