"""What the tests of commands share."""

import pytest

from fedjax_dp.cli import main


@pytest.fixture
def fedjax_dp(monkeypatch, capsys):
    """Gives the command: `(words) -> (status, output, errors)`."""

    def invoke(*words):
        monkeypatch.setattr("sys.argv", ["fedjax-dp", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    return invoke
