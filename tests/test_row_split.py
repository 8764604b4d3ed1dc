"""The held-out rows of a deployed site: adding one row changes one count by one."""

import numpy as np
import polars as pl
import pytest
from flwr.app import Context, RecordDict

from fedgft.data.partition import hold_out_by_row
from fedgft.data.table import read_frame, read_rows_as_text
from fedgft.errors import FedgftError
from fedgft.flower.client_app import _choose_test_rows, _data_file
from fedgft.privacy.ledger import read_salt, site_folder
from neighboring_tables import count_rows, draw_table, neighbors, sensitivity

SALT = bytes(range(32))


def context_of(folder, name="north.csv", **more):
    node = {"data": str(folder / name), "state": str(folder / "state")}
    config = {"label": "ok", "group": "sex", "split": "", "test-share": 0.3, **more}
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=config)


def training(context) -> pl.DataFrame:
    frame = read_frame(_data_file(context))
    return frame.filter(~_choose_test_rows(frame, _data_file(context), context))


@pytest.mark.slow
def test_one_row_moves_the_counts_by_at_most_one() -> None:
    """Over neighboring tables with many duplicates: rows added and removed anywhere."""
    moved = sensitivity(200, rows=300, seed=3)
    assert max(moved) <= 1 and set(moved) == {0.0, 1.0}


def test_a_site_with_a_file_moves_by_at_most_one(tmp_path) -> None:
    """From the CSV on, as a deployed site reads it; the row that is added even makes a column of
    numbers one of words."""
    table = draw_table(300, seed=1)
    context = context_of(tmp_path)
    table.write_csv(tmp_path / "north.csv")
    before = count_rows(training(context))
    strange = table[:1].with_columns(pl.lit("unknown").alias("income"))
    text = table.with_columns(pl.col("income").cast(pl.String))
    for other in (table[1:], table[:-1], pl.concat([text, strange]), pl.concat([strange, text])):
        other.write_csv(tmp_path / "north.csv")
        assert np.abs(count_rows(training(context)) - before).sum() <= 1


def test_the_split_depends_on_rows_and_salt_alone(tmp_path) -> None:
    """Not on their order, nor on what the server says; and it survives a restart."""
    rows = [f"row {i % 40}" for i in range(400)]
    held = hold_out_by_row(rows, share=0.3, salt=SALT)
    order = np.random.default_rng(0).permutation(400)
    again = hold_out_by_row([rows[i] for i in order], share=0.3, salt=SALT)
    count = lambda rows, held: sorted(r for r, h in zip(rows, held, strict=True) if h)  # noqa: E731
    assert count(rows, held) == count([rows[i] for i in order], again)
    other = hold_out_by_row(rows, share=0.3, salt=SALT[::-1])
    assert 0.2 < held.mean() < 0.4 and (held != other).mean() > 0.2
    draw_table(200, seed=2).write_csv(tmp_path / "north.csv")
    first = context_of(tmp_path)
    second = context_of(tmp_path, seed=9)
    second.run_id = 77
    assert training(first).equals(training(second))
    assert read_salt(first, "north") == read_salt(second, "north")


def test_shares_are_what_was_asked_for() -> None:
    rows = [str(i) for i in range(20_000)]
    for share in (0.0, 0.1, 0.3, 0.9):
        found = hold_out_by_row(rows, share=share, salt=SALT).mean()
        assert abs(found - share) < 5 * (share * (1 - share) / 20_000) ** 0.5 + 1e-12
    same = hold_out_by_row(["twin"] * 20_000, share=0.3, salt=SALT).mean()  # duplicates, too
    assert abs(same - 0.3) < 5 * (0.21 / 20_000) ** 0.5
    for share in (1.0, -0.1, float("nan")):
        with pytest.raises(FedgftError, match="test_share"):
            hold_out_by_row(rows, share=share, salt=SALT)


def test_text_of_rows_is_that_of_the_row_alone(tmp_path) -> None:
    csv = tmp_path / "a.csv"
    csv.write_text('a,b\n1,x\n1.0,x\n1,\n1,""\n"1,2","q"\n')
    found = read_rows_as_text(csv)
    assert len(set(found)) == 5
    csv.write_text('a,b\n1,x\n1.0,x\n1,\n1,""\n"1,2","q"\nword,5\n')
    assert read_rows_as_text(csv)[:5] == found
    whole = tmp_path / "whole.parquet"
    holed = tmp_path / "holed.parquet"
    pl.DataFrame({"a": [1, 2]}).write_parquet(whole)
    pl.DataFrame({"a": [1.0, 2.0, None]}).write_parquet(holed)
    assert read_rows_as_text(holed)[:2] == read_rows_as_text(whole)


def test_the_salt_is_secret_and_two_sites_have_two(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    places = []
    for name in ("north", "south"):
        context = context_of(tmp_path)
        context.node_config = {"data": f"/data/{name}.csv", "site": name}
        places.append(site_folder(context, name))
        assert len(read_salt(context, name)) == 32
        assert (places[-1] / "salt").stat().st_mode & 0o777 == 0o600
        assert places[-1].stat().st_mode & 0o777 == 0o700
    assert len(set(places)) == 2 and all(place.is_relative_to(tmp_path) for place in places)
    (places[0] / "salt").write_text("short")
    with pytest.raises(FedgftError, match="not the 32 bytes"):
        read_salt(
            Context(
                run_id=1,
                node_id=1,
                state=RecordDict(),
                run_config={},
                node_config={"data": "/data/north.csv", "site": "north"},
            ),
            "north",
        )


def test_neighbors_differ_by_one_row() -> None:
    """The tables that everything here rests on."""
    for one, other in neighbors(20, rows=50, seed=0):
        assert abs(len(one) - len(other)) == 1
        small, large = sorted((one.rows(), other.rows()), key=len)
        for row in small:
            large.remove(row)
        assert len(large) == 1
