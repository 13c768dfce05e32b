"""Output that shows someone else's run has no terminal escapes and no credentials."""

import ast
import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import DataParallelTrainer, DrivetrainError, Result, RunConfig, ScalingConfig
from drivetrain._base.console import Console
from drivetrain._base.printable import printable_text
from drivetrain._base.redact import describe, masked, redact
from drivetrain._driver.control import ask, listen
from drivetrain._storage.directory import runs_location
from drivetrain._storage.lock import RunLock
from drivetrain_console._views.plot import plot
from tests.security.conftest import Command, reading_commands
from tests.support import PROCESS_LIMIT_S

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b1m\x08\r\u202e"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
CLI = Path(drivetrain.__file__).parent / "_cli"


def poison(value: object) -> object:
    """The document with escapes in all texts and names that the format leaves open."""
    if isinstance(value, dict):
        return {name if name in STRUCTURE else f"{name}{ESCAPES}": poison(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [poison(inner) for inner in value]
    return value + ESCAPES if isinstance(value, str) and value not in STRUCTURE else value


def structure_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return {name for name in value if name not in ("step", "loss")}.union(*map(structure_of, value.values()))
    return set().union(*map(structure_of, value)) if isinstance(value, list) else set()


def texts_in(value: object) -> list[str]:
    """All texts and names of a document, as a program that has decoded it sees them."""
    if isinstance(value, dict):
        return [*value, *(text for inner in value.values() for text in texts_in(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in texts_in(inner)]
    return [value] if isinstance(value, str) else []


STRUCTURE: set[str] = set()


@pytest.fixture
def poisoned(place: Path) -> Path:
    """A directory with the good run, and one whose name and files have escapes wherever the format allows it."""
    run = place / f"hostile{ESCAPES}"
    (place / "hostile").rename(run)
    for name in ("run.json", "manifest.json", "error.json", "result.json", "timeline.jsonl"):
        file = run / name
        is_lines = name.endswith(".jsonl") or name == "result.json"
        lines = file.read_text().splitlines() if is_lines else [file.read_text()]
        documents = [json.loads(line) for line in lines]
        for document in documents:
            STRUCTURE.update(structure_of(document))
            STRUCTURE.update(
                {document.get("event", ""), document.get("kind", ""), document.get("id", "")}
                | {entry["name"] for entry in document.get("checkpoints", [])}
            )
        file.write_text("".join(json.dumps(poison(document)) + "\n" for document in documents))
    (run / "logs" / "rank_0.log").write_text(f"line{ESCAPES}\n")
    return place


def test_no_command_prints_escapes(poisoned: Path, command: Command) -> None:
    run = next(run for run in poisoned.iterdir() if run.name.startswith("hostile"))
    printed = 0
    for words in reading_commands(run, poisoned / "good", poisoned.parent):
        _, out, err = command(*words)
        assert not CONTROLS.search(out + err), (words, out, err)
        if "--json" in words:
            for line in out.splitlines():
                assert not CONTROLS.search("".join(texts_in(json.loads(line)))), (words, line)
        printed += "owned" in out + err
    assert printed > 10, "the text itself is shown"


def test_damage_is_reported_without_escapes(poisoned: Path, command: Command) -> None:
    run = next(run for run in poisoned.iterdir() if run.name.startswith("hostile"))
    (run / "run.json").write_text(f'"{ESCAPES}')
    for words in (["runs", "list", poisoned], ["runs", "show", run], ["runs", "show", f"missing{ESCAPES}"]):
        _, out, err = command(*words)
        assert not CONTROLS.search(out + err)


def test_report_that_is_too_deep_is_shown_as_a_text_without_escapes(place: Path, command: Command) -> None:
    deep = "[" * 101 + json.dumps(ESCAPES) + "]" * 101
    (place / "hostile" / "result.json").write_text(f"{deep}\n")
    _, out, _ = command("runs", "tail", place / "hostile", "--no-follow", "--json")
    assert json.loads(out) == deep


def test_error_as_json_has_no_escapes_when_it_is_decoded(place: Path, command: Command) -> None:
    _, _, err = command("runs", "show", place / f"missing{ESCAPES}", "--json")
    assert "owned" in json.loads(err)["error"]
    assert not CONTROLS.search("".join(texts_in(json.loads(err))))


def test_commands_print_only_through_the_function_that_removes_escapes() -> None:
    for file in CLI.glob("*.py"):
        calls = [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
        assert len(calls) == (file.name == "output.py"), f"{file}: print through output.write()"


def test_messages_of_a_driver_have_no_escapes_and_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    Console().print(f"run{ESCAPES}: s3://key:secret@bucket is damaged", error=True)
    err = capsys.readouterr().err
    assert not CONTROLS.search(err)
    assert "secret" not in err


def test_error_of_a_result_has_no_escapes(place: Path) -> None:
    file = place / "hostile" / "error.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "message": f"failed{ESCAPES}\nbadly"}))

    error = Result.from_path(place / "hostile").error

    assert str(error).startswith("failed")
    assert "\nbadly" in str(error)
    assert not CONTROLS.search(str(error))


def test_plot_keeps_its_own_colors_only() -> None:
    text = plot({f"a{ESCAPES}": [(1, 1, 1, 1)], "b": [(1, 2, 2, 2)]}, title=f"t{ESCAPES}", width=60)
    assert not CONTROLS.search(text)
    assert not CONTROLS.search(plot({}, title=ESCAPES))
    assert printable_text("\x1b[34mx\x1b[0m\x1b[5m", colored=True) == "\x1b[34mx\x1b[0m\N{REPLACEMENT CHARACTER}[5m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://k:p@ss@bucket/x", "s3://***@bucket/x"),
        ("s3://k:se/cr@et@bucket/x", "s3://***@bucket/x"),
        ("https://h/x?sas=A&pw=B&credential=C&X-Amz-Credential=D", "https://h/x?sas=***&pw=***&credential=***&X-Amz-Credential=***"),
        ("https://h/x?sv=1&sig=A#token=B", "https://h/x?sv=1&sig=***#token=***"),
        ("https://h/x?%73ig=A", "https://h/x?%73ig=***"),
        ("https://h/x?X-Amz-Signature=A;password=B", "https://h/x?X-Amz-Signature=***;password=***"),
        ("cannot read 'ftp://u:p@h/x' of a@b.org", "cannot read 'ftp://***@h/x' of a@b.org"),
        ("http://host.org:8080/a@b?page=2&design=3&author=4", "http://host.org:8080/a@b?page=2&design=3&author=4"),
        ("http://localhost:8080/a@b", "http://localhost:8080/a@b"),
        ("hdfs://namenode:8020/user/a@b", "hdfs://namenode:8020/user/a@b"),
        ("s3://user:123/abc@host/x", "s3://***@host/x"),
        ("http://minio:9000/bucket/model@v2", "http://minio:9000/bucket/model@v2"),
        ("http://node-2:8080/x?user=a@b.org&key=K", "http://node-2:8080/x?user=a@b.org&key=***"),
        ("https://user:123@host/x", "https://***@host/x"),
        ("https://user:pa/ss@host/x", "https://***@host/x"),
        ("ftp://user:123/abc@host/x", "ftp://***@host/x"),
        ("abfs://data@account.dfs.core.windows.net/x@y", "abfs://data@account.dfs.core.windows.net/x@y"),
        ("abfss://data@account/x?sas=A", "abfss://data@account/x?sas=***"),
        ("wasbs://user:key@account/x", "wasbs://***@account/x"),
        ("sftp://user:1234567/abc@host.org/x", "sftp://***@host.org/x"),
        ("s3://a:1/b@c://d:2/e@f", "s3://***@c://***@f"),
        ("https://h/x?code=1", "https://h/x?code=***"),
        ("https://h/x?auth_code=1&state=2", "https://h/x?auth_code=***&state=2"),
        ("http://[::1]:8080/a@b", "http://[::1]:8080/a@b"),
        (json.dumps("s3://k:p\u00e9@b?token=\u00e9a"), '"s3://***@b?token=***"'),
    ],
)  # fmt: skip
def test_credentials_are_redacted(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("login(token='A', x=1)", "login(token='***', x=1)"),
        ("ValueError: bad token=A)", "ValueError: bad token=***)"),
        ("export HF_TOKEN=A KEY=B", "export HF_TOKEN=*** KEY=***"),
        ("os.environ['HF_TOKEN'] = 'A'", "os.environ['HF_TOKEN'] = '***'"),
        ("Authorization: Bearer abcd.efg", "Authorization: Bearer ***"),
        ("Authorization: Basic dXNlcg==", "Authorization: Basic ***"),
        ("{'Authorization': 'Bearer abcd'}", "{'Authorization': '***'}"),
        ('{"password": "a\\"b", "n": 1}', '{"password": "***", "n": 1}'),
        (r"{\"token\": \"A\", \"b\": 1}", r"{\"token\": \"***\", \"b\": 1}"),
        ("Invalid token: hf_abc123", "Invalid token: ***"),
        ("['hf', '--token', 'A', '--x']", "['hf', '--token', '***', '--x']"),
        ("hf --token abc123 --x", "hf --token *** --x"),
        ('token="unfinished', 'token="***'),
        ("secret=b'A'", "secret=b'***'"),
        ("AccountKey=A==;Endpoint=x", "AccountKey=***"),
    ],
)
def test_secrets_outside_of_uris_are_redacted(text: str, shown: str) -> None:
    assert redact(text) == redact(redact(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        *(
            "sorted(names, key=len)",
            "sorted(x, key=lambda a: a.id)",
            "KeyError: 'token'",
            "Missing key: layers.0.weight",
        ),
        *(
            "token: expected a str, got None",
            "Unexpected token: '}'",
            "use --token to pass it",
            "status code: 400, code=7",
        ),
        *("num_key_value_heads=8, pad_token_id=2", "pad_token='<pad>'", "token=None, auth=True", "f(token=token)"),
        *("token = get_token()", "f(token=config['token'])", "token=<object at 0x1>", "Bearer authentication failed"),
    ],
)
def test_code_and_prose_with_a_word_for_a_secret_are_kept(text: str) -> None:
    assert redact(text) == text


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_secrets_of_a_config_are_masked_at_every_depth() -> None:
    config: dict[str, Any] = {
        "hf_token": "A",
        "service": [{"apiKey": b"A", "password": 1234, "api_keys": ["A", "A"]}],
        "credentials": {"user": "A", "pair": ("A", 1), "none": None},
        "uri": "s3://A:A@c",
        "model": Unprintable(),
        "num_key_value_heads": 8,
        "pad_token": "<pad>",
    }
    config["self"] = config

    assert describe(config) == (
        "{'hf_token': '***', 'service': [{'apiKey': '***', 'password': '***', 'api_keys': ['***', '***']}], "
        "'credentials': {'user': '***', 'pair': ('***', 1), 'none': None}, 'uri': 's3://***@c', "
        "'model': <Unprintable object, whose repr() raised ValueError>, 'num_key_value_heads': 8, "
        "'pad_token': '<pad>', 'self': '...'}"
    )
    assert masked(config)["service"] == [{"apiKey": "***", "password": "***", "api_keys": ["***", "***"]}]
    assert masked(config)["model"] is config["model"]


SECRET_OPTIONS = [
    *("key", "api_key", "apikey", "apiKey", "x-api-key", "account_key", "AWSAccessKeyId", "SharedAccessKey", "key1"),
    *("token", "access_token", "authToken", "X-Amz-Security-Token", "secret", "client_secret", "secretsManager"),
    *("password", "PASSWORD", "passwd", "passphrase", "pass", "db.pass", "pwd", "pw", "Signature", "X-Goog-Signature"),
    *("sig", "Sig", "sas", "SAS", "credential", "credentials", "auth", "authorization", "oauth", "jwt", "code"),
]
OTHER_OPTIONS = [
    *("max_tokens", "maxTokens", "tokenizer", "tokens", "passes", "passed", "compass", "bypass", "monkey", "keys"),
    *("keyboard", "author", "authority", "authenticated", "design", "signed", "sigma", "assign", "secretary"),
    *("credits", "exit_code", "codec", "code_version", "encode", "region", "scheme", "endpoint_override"),
]


@pytest.mark.parametrize("name", SECRET_OPTIONS)
def test_option_with_the_word_for_a_secret_is_redacted(name: str) -> None:
    assert redact(f"https://h/x?a=1&{name}=value#{name}=value") == f"https://h/x?a=1&{name}=***#{name}=***"


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_option_with_a_word_that_only_contains_one_for_a_secret_is_kept(name: str) -> None:
    assert redact(f"https://h/x?a=1&{name}=value#{name}=value") == f"https://h/x?a=1&{name}=value#{name}=value"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "part",
    [
        "://a:",
        "://",
        "://a@",
        "?a",
        "?a=",
        "://a:b@c?key=",
        "a://b:1/",
        "token='",
        'token="x',
        "a=",
        "token: x",
        "bearer ",
        "--token ",
        'token=\\\\"',
        "token='\\n",
    ],
)
def test_long_text_of_someone_else_is_redacted_in_linear_time(part: str) -> None:
    redact(part * 200_000)


@pytest.mark.timeout(20)
def test_long_name_of_an_option_is_checked_in_linear_time() -> None:
    redact(f"?{'auth' * 200_000}x={'token' * 200_000}")


def test_credentials_are_not_stored_or_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = "s3://key:SECRET@data/set?sas=SECRET&region=eu"

    def train(config: dict[str, str]) -> None:
        drivetrain.report({"step": 1})
        raise OSError(f"cannot read {config['data']}")

    result = DataParallelTrainer(
        train,
        train_loop_config={"data": uri},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit(raise_on_failure=False)
    assert result.error is not None
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.name != "trainer.pkl":
            assert b"SECRET" not in file.read_bytes(), file
    assert "sas=***&region=eu" in (tmp_path / "run" / "run.json").read_text()
    captured = capsys.readouterr()
    assert "SECRET" not in captured.out + captured.err


UMASKS = """
import os, sys
os.umask(int(sys.argv[2], 8))
import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig


def train():
    drivetrain.report({"step": 1})
    raise ValueError("no such column")


DataParallelTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="run", storage_path=sys.argv[1], verbose=0),
).fit(raise_on_failure=False)
"""
PRIVATE = ["run.json", "error.json", "error.txt", "timeline.jsonl", "logs/rank_0.log"]


@pytest.mark.parametrize(("umask", "mode"), [("000", 0o660), ("022", 0o640), ("077", 0o600)])
def test_files_with_configuration_are_private_and_shared_with_the_group(tmp_path: Path, umask: str, mode: int) -> None:
    script = tmp_path / "job.py"
    script.write_text(UMASKS)
    subprocess.run(
        [sys.executable, str(script), str(tmp_path), umask], check=True, capture_output=True, timeout=PROCESS_LIMIT_S
    )
    found = {name: stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) for name in PRIVATE}
    assert found == dict.fromkeys(PRIVATE, mode)
    assert stat.S_IMODE((tmp_path / "run" / "trainer.pkl").stat().st_mode) == 0o600  # it contains secrets


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_metrics_follow_the_umask(tmp_path: Path, umask: int) -> None:
    script = tmp_path / "job.py"
    script.write_text(UMASKS)
    subprocess.run(
        [sys.executable, str(script), str(tmp_path), f"{umask:o}"],
        check=True,
        capture_output=True,
        timeout=PROCESS_LIMIT_S,
    )
    names = ["result.json", "progress.csv", "usage.jsonl"]
    found = {name: stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) for name in names}
    assert found == dict.fromkeys(names, 0o666 & ~umask)


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o664), (0o022, 0o644)])
def test_lock_can_be_opened_by_the_group(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with RunLock(runs_location(str(tmp_path))).acquired():
            assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == mode
    finally:
        os.umask(before)


SQUATTER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"\\0drivetrain-{sys.argv[1]}-{sys.argv[2]}")
listener.listen()
print("listening", flush=True)
peer, _ = listener.accept()
try:
    print(peer.recv(100), flush=True)
    peer.sendall(b"\\x1b]0;owned\\x07")
except OSError:
    pass
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start a process of another user")
def test_socket_of_another_user_is_not_trusted() -> None:
    command = [sys.executable, "-c", SQUATTER, str(os.getuid()), "feedbeef"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as squatter:
        assert squatter.stdout is not None
        try:
            assert squatter.stdout.readline() == b"listening\n"
            with pytest.raises(DrivetrainError, match="of this user, got a process of user id 65534"):
                ask("feedbeef", "stacks")
        finally:
            squatter.kill()
            assert b"stacks" not in squatter.stdout.read(), "nothing was sent to it"


def test_own_driver_answers() -> None:
    with listen("feedcafe", lambda question: f"answer to {question}"):
        assert ask("feedcafe", "stacks") == "answer to stacks"
    assert ask("feedcafe", "stacks") is None


def test_driver_that_accepts_no_connection_is_reported() -> None:
    address = f"\0drivetrain-{os.getuid()}-feedfull"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(address)

        with pytest.raises(DrivetrainError, match="run feedfull is on this machine but does not accept connections"):
            ask("feedfull", "stacks")


def test_question_that_is_no_text_does_not_end_the_answers() -> None:
    with listen("feedc0de", lambda question: f"answer to {question}"):
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(10)
            line.connect(f"\0drivetrain-{os.getuid()}-feedc0de")
            line.sendall(b"\xff")
            assert line.recv(100).decode() == "answer to \N{REPLACEMENT CHARACTER}"
        assert ask("feedc0de", "stacks") == "answer to stacks"


def test_endless_answer_is_not_kept() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0drivetrain-{os.getuid()}-feedface")
        listener.listen()
        script = (
            "import os, socket, sys\n"
            "listener = socket.socket(fileno=int(sys.argv[1]))\n"
            "peer, _ = listener.accept()\n"
            "try:\n"
            "    while True: peer.sendall(b'x' * (1 << 20))\n"
            "except OSError: pass\n"
        )
        command = [sys.executable, "-c", script, str(listener.fileno())]
        with subprocess.Popen(command, pass_fds=[listener.fileno()]) as process:
            try:
                with pytest.raises(DrivetrainError, match="at most 16,777,216 bytes"):
                    ask("feedface", "stacks")
            finally:
                process.kill()


def test_notebook_shows_texts_as_texts(place: Path) -> None:
    file = place / "hostile" / "error.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"message": "<script>alert(1)</script>"}))
    shown = Result.from_path(place / "hostile")._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
