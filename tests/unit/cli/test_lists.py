from holdall.cli.lists import spread


def test_a_list_ends_with_the_next_option_or_a_subcommand() -> None:
    words = ["--profiles", "fast", "balanced", "--seeds", "3", "--buffers", "sb3", "holdall", "buffers", "x"]
    assert spread(words, {"--profiles", "--buffers"}, {"buffers"}) == [
        "--profiles", "fast", "--profiles", "balanced", "--seeds", "3", "--buffers", "sb3", "--buffers", "holdall",
        "buffers", "x",
    ]  # fmt: skip


def test_one_word_a_time_and_other_options_stay_as_they_are() -> None:
    words = ["--case", "atari", "--case", "camera", "--out", "file", "-v"]
    assert spread(words, {"--case"}) == words
