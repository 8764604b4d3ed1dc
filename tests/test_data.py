"""Tables of users, and the reasons for which they are refused."""

import subprocess
import sys

import numpy as np
import polars as pl
import pytest

import fedgft
from fedgft.data import Encoder, load_table, load_tables
from fedgft.data.encode import put_positive_last
from fedgft.data.features import explain_identifier
from fedgft.data.table import detect_separator, read_frame, read_rows_as_text
from fedgft.errors import FedgftError

TABLE = """age,job,sex,site,part,hired
30,clerk,F,a,train,no
40,smith,M,b,train,yes
,clerk,F,a,test,no
50,,M,b,Train,yes
20,smith,,a,TEST,yes
"""
ROLES = {"label": "hired", "group": "sex", "client": "site", "split": "part"}


@pytest.fixture
def write(tmp_path):
    def write(text, name="people.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_import_is_light():
    code = (
        "import sys, fedgft.data, fedgft.data.partition, fedgft.data.dataset, "
        "fedgft.data.public; "
        "print([m for m in ('torch', 'pandas', 'PIL', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_table(write):
    data = load_table(write(TABLE), label="hired", group="sex", client="site")
    # a split column that is not named as one is a feature like any other
    assert data.columns[:3] == ("age", "job=smith", "job=(missing)")
    assert data.classes == ("no", "yes")
    assert data.labels.tolist() == [0, 1, 0, 1, 1]
    assert data.group_names == ("F", "M")
    assert data.groups.tolist() == [0, 1, 0, 1, -1]
    assert data.client_names == ("a", "b")
    assert data.clients.tolist() == [0, 1, 0, 1, 0]
    assert data.test is None
    assert data.features.dtype == np.float32
    assert data.features[:, 0].tolist() == [30, 40, 35, 50, 20]  # 35: the mean of the others
    assert data.features[:, 2].tolist() == [0, 0, 0, 1, 0]
    notes = "\n".join(data.notes)
    assert "rows whose group is not recorded: 1" in notes
    assert "1 missing value of 'age' replaced by the mean over all clients' rows, 35" in notes
    empty = pl.DataFrame({"x": pl.Series([None, None], dtype=pl.Float64)})
    (said,) = Encoder.fit(empty, ["x"]).encode(empty)[1]
    assert said.endswith("replaced by 0, the mean over all clients' rows, or no mean is known")
    assert "1 missing value of 'job' counted as a category of its own" in notes


def test_user_split_keeps_test_rows_out_of_the_encoder(write):
    data = load_table(write(TABLE), **ROLES)
    assert data.test.tolist() == [False, False, True, False, True]
    assert data.columns == ("age", "job=smith", "job=(missing)")
    assert data.features[2, 0] == 40  # the mean of 30, 40 and 50: no test row has a say
    seen = load_table(write(TABLE.replace("20,smith", "20,baker")), keep_group=True, **ROLES)
    assert seen.columns == (*data.columns, "sex=M")
    assert any("1 value of 'job' (" in n for n in seen.notes)


def test_parquet_equals_csv(write, tmp_path):
    path = write(TABLE)
    parquet = tmp_path / "people.parquet"
    pl.read_csv(path).write_parquet(parquet)
    one = load_table(path, **ROLES)
    two = load_table(parquet, **ROLES)
    np.testing.assert_array_equal(one.features, two.features)
    assert one.encoder == two.encoder


@pytest.mark.parametrize("group", ["sex,job", ["sex", "job"], "sex, job"])
def test_intersection_groups(write, group):
    data = load_table(write(TABLE), label="hired", group=group)
    assert data.group_names == ("F & clerk", "M & smith")
    assert data.groups.tolist() == [0, 1, 0, -1, -1]


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["10", "9", "9"], ("9", "10")),  # numbers as numbers
        (["1.0", "0.0", "0.0"], ("0", "1")),
        (["true", "false", "false"], ("False", "True")),
        (["good", "bad", "bad"], ("bad", "good")),
        (["c", "a", "b"], ("a", "b", "c")),
    ],
)
def test_classes(write, values, classes):
    rows = "".join(f"{i},g{i % 2},{value}\n" for i, value in enumerate(values))
    data = load_table(write("x,g,y\n" + rows), label="y", group="g")
    assert data.classes == classes
    assert data.labels[0] == len(classes) - 1 or len(classes) == 3


def test_positive(write):
    path = write("x,g,y\n1,a,bad\n2,b,good\n")
    data = load_table(path, label="y", group="g", positive="bad")
    assert data.classes == ("good", "bad")
    assert data.labels.tolist() == [1, 0]


def test_positive_in_another_case():
    """Where classes differ in case alone it decides."""
    assert put_positive_last(("No", "Yes"), "NO", where="y") == ("Yes", "No")
    assert put_positive_last(("Yes", "yes"), "Yes", where="y") == ("yes", "Yes")
    with pytest.raises(FedgftError, match=r"y holds 'YES' and 'yes', no 'Yes' \(positive\)"):
        put_positive_last(("YES", "yes"), "Yes", where="y")


def rows(*lines, header="x,g,y"):
    return "\n".join((header, *lines)) + "\n"


def ages(*odd):
    """Twenty different numbers, then these values."""
    values = (*(str(20 + i) for i in range(20)), *odd)
    return rows(*(f"{value},{'ab'[i % 2]},{i % 2}" for i, value in enumerate(values)))


GOOD = ("1,a,0", "2,b,1")
ERRORS = {
    "empty file": ("", {}, "the file is empty"),
    "header only": ("x,g,y\n", {}, "the file has no rows"),
    "misspelt label": (rows(*GOOD), {"label": "Y "}, r"no column 'Y ' \(label\).*'y'"),
    "misspelt group": (rows(*GOOD), {"group": "gg"}, r"no column 'gg' \(group\).*'g'"),
    "misspelt client": (rows(*GOOD), {"client": "q"}, r"'q' \(client\); there are: x, g, y"),
    "misspelt split": (rows(*GOOD), {"split": "q"}, r"no column 'q' \(split\)"),
    "no group": (rows(*GOOD), {"group": " , "}, "group needs the name"),
    "one class": (rows("1,a,1", "2,b,1"), {}, "label column 'y' has one class only, '1'"),
    "missing labels": (rows("1,a,", "2,b,1", "3,b,"), {}, r"column 'y' lacks 2 value"),
    "fractions": (rows("1,a,0.5", "2,b,1"), {}, "'y' holds fractions"),
    "empty group": (rows("1,,0", "2,,1"), {}, r"group column 'g' \(group\) is empty"),
    "nan": (rows("NaN,a,0", "2,b,1"), {}, r"column 'x' holds 1 value not finite"),
    "infinite": (rows("1,a,0", "-inf,b,1"), {}, r"column 'x' holds 1 value not finite"),
    "nan in text": (ages("nan"), {}, r"column 'x' holds 1 value not finite"),
    "inf in text": (ages("Inf", " -INF"), {}, r"column 'x' holds 2 values not finite"),
    "nan among few": (rows("nan,a,0", "2,b,1"), {}, r"column 'x' holds 1 value not finite"),
    "stray mark": (
        ages("?"),
        {},
        r"column 'x' holds numbers, but also 1 other value.*\('\?'\).*empty",
    ),
    "stray words": (ages("-", "n/a"), {}, r"column 'x' holds numbers, but also 2.*\('-', 'n/a'\)"),
    "spaces": (ages(" 41"), {}, r"column 'x' holds numbers, but also 1 other value.*\(' 41'\)"),
    "twice": (rows("1,a,0,1", "2,b,1,2", header="x,g,y,x"), {}, "'x' is in the header more than"),
    "label twice": (rows("0,a,0", "1,b,1", header='"y",g,y'), {}, "column 'y' is in the header"),
    "no name twice": (rows("1,a,0,,", "2,b,1,,", header="x,g,y,,"), {}, "column '' is in the"),
    "overflow": (rows("1,a,0", "1e300,b,1"), {}, r"column 'x' holds 1 value"),
    "two parts": (rows(*GOOD), {"group": "y"}, "column 'y' is both label and group"),
    "bad split": (rows(*GOOD), {"split": "g"}, "column 'g' is both group and split"),
    "split word": (rows(*GOOD), {"split": "x"}, "'x' must hold 'train' or 'test', not '1'"),
    "no positive": (rows(*GOOD), {"positive": "2"}, r"holds '0' and '1', no '2' \(positive\)"),
    "three": (rows(*GOOD, "3,a,2"), {"positive": "2"}, "3 classes; positive needs two"),
    "damaged": (rows("1,a,0", "2,b,1,5,6"), {}, "cannot be read as CSV"),
    "no features": (
        rows("a,0", "b,1", header="g,y"),
        {"client": "g"},
        r"no column is left to learn from \('g': the client, 'y': the label\)",
    ),
    "keep nothing": (rows(*GOOD), {"keep": ["X"]}, r"no column 'X' \(keep\); did you mean 'x'"),
    "keep label": (rows(*GOOD), {"keep": ["y"]}, "column 'y' is both label and keep"),
    "keep and leave": (
        rows(*GOOD),
        {"keep": ["x"], "leave_out": ["x"]},
        "column 'x' is both keep and leave_out",
    ),
    "keep and leave group": (
        rows(*GOOD),
        {"keep_group": True, "leave_out": ["g"]},
        "column 'g' is both keep_group and leave_out",
    ),
}


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_one_line_errors(write, case):
    text, roles, message = ERRORS[case]
    path = write(text)
    with pytest.raises(FedgftError, match=message) as caught:
        load_table(path, **{"label": "y", "group": "g", **roles})
    assert "\n" not in str(caught.value)
    assert case == "no group" or str(path) in str(caught.value)


def test_a_stray_value_among_the_test_rows_is_found(write):
    values = [*(f"{i},ab{i % 2},{i % 2},train" for i in range(20)), "?,ab0,1,test"]
    with pytest.raises(FedgftError, match=r"column 'x' holds numbers, but also 1 other value"):
        load_table(write(rows(*values, header="x,g,y,s")), label="y", group="g", split="s")


def test_text_that_stays_text(write, tmp_path):
    mixed = ages(*(f"v{i}" for i in range(5)))  # a fifth of them: these are codes
    assert len(load_table(write(mixed), label="y", group="g").columns) == 24
    few = rows("1,a,0", "2,b,1", "?,a,1")
    assert load_table(write(few), label="y", group="g").columns == ("x=2", "x=?")
    codes = tmp_path / "codes.parquet"
    typed = pl.DataFrame({"x": [f"{i:03}" for i in range(20)], "g": ["a", "b"] * 10})
    typed.with_columns(y=pl.Series([0, 1] * 10)).write_parquet(codes)
    data = load_table(codes, label="y", group="g")
    assert len(data.columns) == 19
    assert any("'x' holds numbers only: they are taken as 20 categories" in n for n in data.notes)


@pytest.mark.parametrize("name", ["[bold]日本", "a*b", "what?", "{x}"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_file_names_are_no_patterns(write, tmp_path, name, ending):
    csv = write(TABLE, f"{name}.csv")
    path = tmp_path / f"{name}.{ending}"
    if ending == "parquet":
        pl.read_csv(csv, glob=False).write_parquet(path)
    write("q\n1\n", "aXb.csv")
    data = load_table(path, **ROLES)
    assert (data.name, len(data)) == (name, 5)


def test_notes_on_the_classes(write):
    path = write("x,g,y\n1,a,no\n2,b,yes\n")
    note = load_table(path, label="y", group="g").notes[0]
    assert note == f"{path}: positive class: 'yes' (`positive` names another)"
    asked = load_table(path, label="y", group="g", positive="no")
    assert asked.notes[0] == f"{path}: positive class: 'no'"
    three = load_table(write("x,g,y\n1,a,p\n2,b,q\n3,b,r\n"), label="y", group="g")
    assert three.notes[0] == f"{path}: label column 'y' has 3 classes"


@pytest.mark.parametrize("separator", [";", "\t"])
def test_the_separator_of_a_csv_is_found(write, separator):
    text = TABLE.replace("smith", '"smith, or, so"')
    plain = write(text)
    other = write(text.replace(",", separator).replace(f"smith{separator}", "smith,"), "other.csv")
    assert detect_separator(other) == separator
    expected = read_frame(plain)
    assert read_frame(other).columns == expected.columns
    found = load_table(other, **ROLES)
    np.testing.assert_array_equal(found.features, load_table(plain, **ROLES).features)
    assert found.client_names == ("a", "b")
    assert len(read_rows_as_text(other)) == len(found)
    with pytest.raises(FedgftError, match="'x' is in the header more than once"):
        read_frame(write(f"x{separator}x\n1{separator}2\n"))


SEPARATORS = {
    "one column": ("text\nhello; there; you\n", ","),
    "quoted name": ('"a;b",c\n1,2\n', ","),
    "name with a semicolon": ("a;b,c\n1,2\n3,4\n", ","),
    "name with a comma": ("a,b;c\n1;2\n3;4\n", ";"),
    "decimal commas": ("a;b\n1,5;2,5\n", ";"),
    "tab among commas": ("a,b\n1,x\ty\n", ","),
    "mark of UTF-8": ("\ufeffa;b\n1;2\n", ";"),
    "line ends": ("a;b\r\n1;2\r\n", ";"),
    "line in a cell": ('a;b\n"1\n2,3";4\n', ";"),
    "empty": ("", ","),
}


@pytest.mark.parametrize("case", SEPARATORS)
def test_separators(write, case):
    text, separator = SEPARATORS[case]
    assert detect_separator(write(text)) == separator


@pytest.mark.parametrize("value", ["3,5", "-3,5", "1.234,5", "1,234.5"])
def test_commas_in_numbers_are_refused(write, value):
    text = rows(f'"{value}";a;0', "2;b;1").replace(",g,", ";g;")
    with pytest.raises(FedgftError, match=r"column 'x' has commas in its numbers .* decimal point"):
        load_table(write(text), label="y", group="g")
    encoder = Encoder.fit(pl.DataFrame({"x": [1.5, 2.0]}), ["x"])
    with pytest.raises(FedgftError, match=r"numbers, not '.*': write them with a decimal point"):
        encoder.encode(pl.DataFrame({"x": [value]}))


def test_one_sided_split_is_an_error(write):
    path = write(rows("1,a,0,train", "2,b,1,train", header="x,g,y,s"))
    with pytest.raises(FedgftError, match="'s' needs both 'train' and 'test' rows"):
        load_table(path, label="y", group="g", split="s")


def test_missing_clients_are_an_error(write):
    path = write(rows("1,a,0,", "2,b,1,c", header="x,g,y,c"))
    with pytest.raises(FedgftError, match="client column 'c' lacks 1 value"):
        load_table(path, label="y", group="g", client="c")


@pytest.mark.parametrize("name", ["people.txt", "people", "people.csv.gz"])
def test_other_endings_are_errors(write, name):
    with pytest.raises(FedgftError, match=r"must be \.csv or \.parquet"):
        load_table(write(TABLE, name), **ROLES)


def test_missing_and_damaged_files(write, tmp_path):
    with pytest.raises(FedgftError, match=r"nobody\.csv: no such file"):
        load_table(tmp_path / "nobody.csv", **ROLES)
    with pytest.raises(FedgftError, match=r"x\.parquet: cannot be read as PARQUET"):
        load_table(write(TABLE, "x.parquet"), **ROLES)


def customers(n=200):
    rng = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "age": rng.integers(18, 90, n),
            "income": rng.permutation(np.arange(20_000, 20_000 + 37 * n, 37)),
            "city": rng.choice(["Bonn", "Lyon"], n),
            "sex": rng.choice(["f", "m"], n),
            "bank": rng.choice(["north", "south"], n),
            "p": rng.random(n),
            "repaid": rng.choice(["no", "yes"], n),
        }
    )


CUSTOMER_ROLES = {"label": "repaid", "group": "sex", "client": "bank"}


def test_which_columns_are_features(tmp_path):
    """The group is no feature unless the user says so (defect 6 of the review)."""
    path = tmp_path / "customers.csv"
    n = customers().height
    table = customers().with_columns(
        customer_id=pl.Series(np.random.default_rng(1).integers(10**6, 10**9, n)),
        row=pl.int_range(n),
        name=pl.format("Customer {}", pl.int_range(n)),
        empty=pl.lit(None),
        country=pl.lit("FR"),
    )
    table.write_csv(path)
    data = load_table(path, **CUSTOMER_ROLES, leave_out=["p"])
    assert data.columns == ("age", "income", "city=Lyon")
    by_name = f"looks like an identifier: its name, and {n} different numbers"
    assert data.excluded == (
        ("sex", "the group"),
        ("bank", "the client"),
        ("p", "left out"),
        ("repaid", "the label"),
        ("customer_id", by_name),
        ("row", "looks like an identifier: whole numbers without gap or repetition"),
        ("name", "looks like an identifier: nearly every row has another text"),
        ("empty", "has no value"),
        ("country", "has one value only"),
    )
    note = next(text for text in data.notes if "not features" in text)
    assert note.startswith(
        f"{path}: not features: 'sex' (the group), 'p' (left out), 'customer_id'"
    )
    assert "the label" not in note and "bank" not in note
    assert {field.name for field in data.encoder.fields} == {"age", "income", "city"}

    kept = load_table(path, **CUSTOMER_ROLES, keep_group=True, keep=["row", "p"])
    assert kept.columns == ("age", "income", "city=Lyon", "sex=m", "p", "row")
    assert "sex" not in dict(kept.excluded)
    assert load_table(path, **CUSTOMER_ROLES, keep=["sex"]).columns[3] == "sex=m"
    with pytest.raises(FedgftError, match=r"to learn from \(.*'p': left out"):
        left = ["age", "income", "city", "p"]
        load_table(path, **CUSTOMER_ROLES, leave_out=left)


def test_codes_and_missing_values_of_a_table(write):
    rng = np.random.default_rng(0)
    frame = customers().with_columns(
        job=pl.Series(rng.integers(1, 6, 200)),
        pay=pl.Series([None if u < 0.2 else str(round(u, 3)) for u in rng.random(200)]),
        repaid=pl.Series(rng.integers(0, 2, 200)),
    )
    path = write(frame.with_columns(pay=pl.col("pay").fill_null("?")).write_csv())
    how = {**CUSTOMER_ROLES, "leave_out": ["p"]}
    with pytest.raises(FedgftError, match=r"'pay' holds numbers, but .*name the value in missing"):
        load_table(path, **how)
    assert "pay=?" in load_table(path, **how, categorical=["pay"]).columns
    plain = load_table(path, **how, missing=["?"])
    assert plain.columns == ("age", "income", "city=Lyon", "job", "pay", "pay=(missing)")
    assert any("few different whole numbers are taken as amounts: 'job'" in n for n in plain.notes)
    empty = load_table(write(frame.write_csv(), "empty.csv"), **how)
    np.testing.assert_array_equal(plain.features, empty.features)
    coded = load_table(path, **how, missing=["?"], categorical=["job"])
    assert coded.columns[3:7] == ("job=2", "job=3", "job=4", "job=5")
    assert not any("taken as amounts" in note for note in coded.notes)
    with pytest.raises(FedgftError, match=r"no column 'jobs' \(categorical\); did you mean 'job'"):
        load_table(path, **how, categorical=["jobs"])
    groups = frame.with_columns(sex=pl.lit("?")).write_csv()
    with pytest.raises(FedgftError, match=r"group column 'sex' .* is empty"):
        load_table(write(groups), **how, missing=["?"])


@pytest.fixture
def banks(tmp_path):
    """Write one file per bank, each with changes; return the paths."""

    def write_banks(**changes):
        paths = []
        for i, name in enumerate(("north", "south", "east")):
            frame = customers()[60 * i : 60 * i + 60].with_columns(bank=pl.lit(name))
            if name in changes:
                frame = changes[name](frame)
            paths.append(tmp_path / f"{name}.csv")
            frame.write_csv(paths[-1], separator=";" if name == "south" else ",")
        return paths

    return write_banks


BANK_ROLES = {"label": "repaid", "group": "sex", "leave_out": ["p"]}


def test_one_file_per_client(banks):
    paths = banks(south=lambda f: f.select(reversed(f.columns)))  # and with semicolons
    data = fedgft.load(paths, **BANK_ROLES)
    assert data.client_names == ("north", "south", "east")
    assert np.bincount(data.clients).tolist() == [60, 60, 60]
    assert data.name == "north, south, east"
    assert ("bank", "one value in each file") in data.excluded
    whole = fedgft.load(customers()[:180], **BANK_ROLES, client="bank")
    assert data.columns == whole.columns == ("age", "income", "city=Lyon")
    np.testing.assert_array_equal(data.features, whole.features)
    np.testing.assert_array_equal(data.labels, whole.labels)
    assert load_tables(paths, **BANK_ROLES, keep=["bank"]).columns[3:] == (
        "bank=north",
        "bank=south",
    )
    named = load_tables(paths, **BANK_ROLES, client="city")
    assert named.client_names == ("Bonn", "Lyon")
    assert ("bank", "one value in each file") not in named.excluded
    alone = fedgft.load(paths[:1], **BANK_ROLES)
    assert alone.clients is None and alone.name == "north"
    federation = fedgft.partition(data, "column", seed=0)
    assert federation.num_clients == 3


def test_types_of_the_columns_of_several_files_are_brought_together(banks):
    paths = banks(
        north=lambda f: f.with_columns(age=pl.col("age").cast(pl.Float64) + 0.5),
        south=lambda f: f.with_columns(income=None, city=None, sex=pl.lit(1)),
    )
    data = fedgft.load(paths, **BANK_ROLES)
    assert data.columns == ("age", "income", "income=(missing)", "city=Lyon", "city=(missing)")
    assert set(data.group_names) == {"f", "m", "1"}
    codes = banks(
        north=lambda f: f.with_columns(zip=pl.lit("A1")),
        south=lambda f: f.with_columns(zip=pl.lit(1)),
        east=lambda f: f.with_columns(zip=pl.lit(2)),
    )
    with pytest.raises(FedgftError, match=r"north\.csv: column 'zip' holds text, such as 'A1',"):
        fedgft.load(codes, **BANK_ROLES)
    coded = fedgft.load(codes, **BANK_ROLES, categorical=["zip"])
    assert coded.columns[-2:] == ("zip=2", "zip=A1")


DISAGREEMENTS = {
    "a column less": (
        lambda f: f.rename({"age": "Age"}),
        r"south\.csv: no column 'age', which .*north\.csv has; did you mean 'Age'",
    ),
    "a column more": (
        lambda f: f.with_columns(more=1),
        r"south\.csv: column 'more' is not in .*north\.csv: take it out, or add it",
    ),
    "text": (
        lambda f: f.with_columns(
            age=pl.when(pl.int_range(60) > 0).then("age").otherwise(pl.lit("?"))
        ),
        r"south\.csv: column 'age' holds text, such as '\?', where .*north\.csv holds numbers",
    ),
    "classes": (
        lambda f: f.with_columns(repaid=(pl.col("repaid") == "yes").cast(pl.Int64)),
        r"south\.csv: label column 'repaid' holds '0', '1', and .*north\.csv 'no', 'yes'",
    ),
    "case": (
        lambda f: f.with_columns(sex=pl.col("sex").str.to_uppercase()),
        r"south\.csv: column 'sex' holds 'F', and .*north\.csv 'f': spell",
    ),
    "spaces": (
        lambda f: f.with_columns(sex=pl.col("sex") + " "),
        r"south\.csv: column 'sex' holds 'f ', and .*north\.csv 'f': spell",
    ),
}


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_files_that_disagree_are_named_with_the_column(banks, kind):
    change, message = DISAGREEMENTS[kind]
    paths = banks(south=change)
    with pytest.raises(FedgftError, match=message) as caught:
        fedgft.load(paths, **BANK_ROLES)
    assert "\n" not in str(caught.value)


def test_lists_of_files_that_are_refused(banks, tmp_path):
    paths = banks()
    (tmp_path / "more").mkdir()
    again = tmp_path / "more" / "north.csv"
    again.write_bytes(paths[0].read_bytes())
    with pytest.raises(FedgftError, match=r"two clients would have the name 'north'"):
        fedgft.load([*paths, again], **BANK_ROLES)
    with pytest.raises(FedgftError, match="'adult' is a data set: name it alone"):
        fedgft.load([paths[0], "adult"], **BANK_ROLES)
    with pytest.raises(FedgftError, match=r"nobody\.csv: no such file"):
        fedgft.load([paths[0], tmp_path / "nobody.csv"], **BANK_ROLES)
    with pytest.raises(FedgftError, match="data"):
        fedgft.load([], **BANK_ROLES)
    with pytest.raises(FedgftError, match="paths must name a file"):
        load_tables([], **BANK_ROLES)
    with pytest.raises(FedgftError, match="label must name a column"):
        fedgft.load(paths, group="sex")
    with pytest.raises(FedgftError, match=r"no column 'repaidd' \(label\)"):
        fedgft.load(paths, **{**BANK_ROLES, "label": "repaidd"})


COUNT = np.random.default_rng(0).permutation(150)
MEASURES = {
    "age": COUNT % 70,
    "income": 20_000 + 37 * COUNT,
    "ranks of a few": np.arange(1, 21),
    "job_id": COUNT % 12,
    "education-num": COUNT % 16,
    "number of children": COUNT % 5,
    "number of steps": 100 * COUNT,
    "paid": 13 * COUNT,
    "consumer index": COUNT / 7,
    "valid": COUNT % 2,
    "account id balance": COUNT + 0.5,
    "day": np.where(COUNT == 3, 4, COUNT),
    "constant id": np.ones(150, int),
}
IDENTIFIERS = {
    "id": [7, 3, 9],
    "Customer-ID": 7 * COUNT,
    "PatientID": COUNT % 50,  # several rows per patient
    "accountNumber": 13 * COUNT,
    "policy no": 13.0 * COUNT,
    "Unnamed: 0": np.arange(100),
    "case": COUNT + 1000,
}


def test_measures_are_no_identifiers_and_identifiers_are_found():
    for name, values in MEASURES.items():
        assert explain_identifier(pl.Series(name, values)) == "", name
    for name, values in IDENTIFIERS.items():
        assert explain_identifier(pl.Series(name, values)), name
    texts = pl.Series("city", [f"city {i // 2}" for i in range(150)])
    assert explain_identifier(texts) == ""
    assert explain_identifier(pl.Series("day", [True, False])) == ""


def test_columns_that_are_no_features(tmp_path):
    names = pl.DataFrame({"n": [f"p{i}" for i in range(1001)], "d": [None] * 1001})
    with pytest.raises(FedgftError, match=r"'n' has 1,001 different values"):
        Encoder.fit(names, ["n"])
    assert Encoder.fit(names, ["d"]).columns == ()
    dates = pl.DataFrame({"day": ["2020-01-01"]}).with_columns(pl.col("day").str.to_date())
    with pytest.raises(FedgftError, match=r"'day' \(Date\) is neither numbers nor text"):
        Encoder.fit(dates, ["day"])
    path = tmp_path / "nested.parquet"
    pl.DataFrame({"x": [1, 2], "g": ["a", "b"], "y": [[0], [1]]}).write_parquet(path)
    with pytest.raises(FedgftError, match=r"nested\.parquet: column 'y' holds List\(Int64\)"):
        load_table(path, label="y", group="g")
