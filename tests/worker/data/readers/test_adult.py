import pytest

from embershard.proto.errors import JobError
from embershard.worker.data.readers.adult import Adult


def person(country, label, age=39):
    middle = "State-gov, 77516, Bachelors, 13, Divorced, Sales, Wife, White, Male, 2174, 0, 40"
    return f"{age}, {middle}, {country}, {label}\n"


TRAIN = person("Cuba", "<=50K", 30) + person("?", ">50K", 50) + "\n"
TEST = "|1x3 Cross validator\n" + person("Chad", ">50K.", 60) + person("Cuba", "<=50K.", 30) + "\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "adult.data").write_text(TRAIN)
    (tmp_path / "adult.test").write_text(TEST)
    return tmp_path / "adult.data", tmp_path / "adult.test"


def only(data, split):
    (batch,) = data.evaluate(split, 0, 1, 20_000)
    return batch


def test_values_are_numbered_by_the_train_file(files):
    data = Adult(*files)
    # seven features of one value and one spare id each, then the two countries and their spare
    assert data.schema.num_ids == 7 * 2 + 3
    assert only(data, "train").ids.tolist() == [[0, 2, 4, 6, 8, 10, 12, 15], [0, 2, 4, 6, 8, 10, 12, 14]]
    assert only(data, "test").ids[:, 7].tolist() == [16, 15]
    assert only(data, "train").labels.tolist() == [0, 1]
    assert only(data, "test").labels.tolist() == [1, 0]
    assert only(data, "train").dense.tolist() == [[30, 13, 2174, 0, 40], [50, 13, 2174, 0, 40]]


def test_numbers_are_standardised_by_the_train_file(files):
    data = Adult(*files, standardise=True)
    assert only(data, "train").dense[:, 0].tolist() == [-1, 1]
    assert only(data, "test").dense[:, 0].tolist() == [2, -1]
    assert (only(data, "train").dense[:, 1:] == 0).all()


def test_a_first_line_that_is_a_sample_is_kept(files):
    files[1].write_text(TEST.partition("\n")[2])
    assert only(Adult(*files), "test").labels.tolist() == [1, 0]


def test_a_bad_line_is_named(files):
    with files[0].open("a") as file:
        file.write(person("Cuba", "50K"))
    with pytest.raises(JobError, match=r"adult\.data:4: column 'income': label ' 50K' is not  <=50K or"):
        Adult(*files)


def test_the_real_files(real_data):
    folder = real_data("adult")
    data = Adult(folder / "adult.data", folder / "adult.test")
    assert (data.num_samples("train"), data.num_samples("test")) == (32_561, 16_281)
    assert data.schema.num_ids == 102 + 8
    assert next(data.train(0, 0, 1, 128)).dense[0].tolist() == [39, 13, 2174, 0, 40]  # in file order, as PERSIA reads
    assert only(data, "test").labels.mean() == pytest.approx(0.2362, abs=1e-4)
