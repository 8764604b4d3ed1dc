"""Datasheets of the tracks: where rows come from, and what is known to be wrong with them.

Numbers are not written here: `fedgft.bench.track_tables.count_track` counts them in the data.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Datasheet:
    """The text of a datasheet.

    Parameters
    ----------
    source, license
        Where the table comes from, and its license.
    row, label, groups
        What a row is, what label 1 means, and how the groups are defined.
    sites
        How rows get their site.
    problems
        Known problems, one sentence each.
    """

    source: str
    license: str
    row: str
    label: str
    groups: str
    sites: str
    problems: tuple[str, ...]


ADULT = Datasheet(
    source="UCI Adult, both files (Becker and Kohavi, 1996), without fnlwgt and education",
    license="CC BY 4.0",
    row="a person in the 1994 census of the United States",
    label="income above 50,000 dollars",
    groups="",  # differ by track
    sites="5, dealt by a Dirichlet draw of 0.5 per group (FedFACT's protocol)",
    problems=(
        "The incomes are of 1994, and results depend on the threshold of 50,000 dollars (Ding et "
        "al., Retiring Adult, NeurIPS 2021).",
        "The column relationship has the levels Husband and Wife: it nearly tells the sex.",
        "The census weights of the rows are left out, so rates are not those of the country.",
    ),
)
COMPAS = Datasheet(
    source="ProPublica's file of two-year recidivism, after ProPublica's filter (2016)",
    license="public records, no license stated",
    row="a defendant in Broward County, Florida, in 2013 and 2014",
    label="charged with a new offense within two years",
    groups="African-American and Caucasian, the two largest; the race is no feature",
    sites="2, dealt by a Dirichlet draw of 0.5 per group (FedFACT's protocol)",
    problems=(
        "The label is a charge, not an offense: it depends on whom the police watch (Bao et al., "
        "It's COMPASlicated, 2021).",
        "The file holds too many people with a new offense, because the cutoff of two years was "
        "not applied to them (Barenstein, 2019).",
        "Only five features are left: a logistic regression reaches an accuracy of 66%.",
        "In some seeds, one site holds fewer than fifty rows.",
    ),
)
LAW = Datasheet(
    source="LSAC National Longitudinal Bar Passage Study (Wightman, 1998), as prepared by Kusner "
    "et al. (2017)",
    license="no license stated",
    row="a student who entered a law school of the United States in 1991",
    label="passed the bar examination at the first attempt",
    groups="race, White or not; the race is no feature",
    sites="the regions of the study, as recorded",
    problems=(
        "Most students pass: a constant is nearly as accurate as a model.",
        "Students who left school before the examination are missing.",
        "The first-year grade (ZFYA) is known only after admission.",
        "The smallest region has fewer than twenty students who are not White.",
    ),
)
ACS = Datasheet(
    source="American Community Survey of 2018, microdata of the Census Bureau, task ACSIncome "
    "(Ding et al., Retiring Adult, NeurIPS 2021)",
    license="public domain, terms of the Census Bureau",
    row="a person above 16 with income and working hours, in one of nine states of the Northeast",
    label="income above 50,000 dollars",
    groups="sex as recorded; the column is no feature",
    sites="the nine states, as recorded",
    problems=(
        "The files are not fetched by a run of the benchmark, because they are large.",
        "The same threshold of income means different things in different states.",
        "The weights of the persons are left out, so rates are not those of the states.",
        "No checksum is recorded for the rows yet.",
    ),
)
CELEBA = Datasheet(
    source="CelebA, aligned pictures (Liu et al., ICCV 2015), 64 x 64 pixels",
    license="for research, not redistributed",
    row="a picture of a celebrity",
    label="marked as smiling",
    groups="marked as male or not; the mark is no feature, but pixels show it",
    sites="5, dealt by a Dirichlet draw of 0.5 per group; the official parts are not used",
    problems=(
        "Marks are judgments of annotators about pictures, not facts about people.",
        "Pictures of the same person may be training and test rows.",
        "The pictures are not downloaded: they must be in the folder celeba inside the folder that "
        "FEDGFT_DATA names.",
    ),
)
