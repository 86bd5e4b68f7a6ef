from holdall.cli.bench import repeat_option_names


def test_a_list_ends_with_the_next_option_or_a_subcommand() -> None:
    words = ["--profiles", "fast", "balanced", "--seeds", "3", "--buffers", "sb3", "holdall", "buffers", "x"]
    assert repeat_option_names(words, {"--profiles", "--buffers"}, {"buffers"}) == [
        "--profiles", "fast", "--profiles", "balanced", "--seeds", "3", "--buffers", "sb3", "--buffers", "holdall",
        "buffers", "x",
    ]  # fmt: skip


def test_one_word_a_time_and_other_options_stay_as_they_are() -> None:
    words = ["--case", "atari", "--case", "camera", "--out", "file", "-v"]
    assert repeat_option_names(words, {"--case"}) == words
