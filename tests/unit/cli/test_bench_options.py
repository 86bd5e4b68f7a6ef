from holdall.cli.bench import repeat_option_names


def test_a_list_option_ends_at_the_next_option() -> None:
    words = ["--profiles", "fast", "balanced", "--seeds", "3", "--buffers", "sb3", "holdall"]
    repeated = [*words[:2], "--profiles", "balanced", "--seeds", "3", "--buffers", "sb3", "--buffers", "holdall"]
    assert repeat_option_names(words, {"--profiles", "--buffers"}) == repeated


def test_other_options_are_not_changed() -> None:
    words = ["--case", "atari", "--case", "camera", "--out", "file", "-v"]
    assert repeat_option_names(words, {"--case"}) == words
