"""What `embershard manifests` prints: valid to the engines' own validators, and words that our own commands take."""

import errno
import re
import shlex
from pathlib import Path

import kubernetes_validate
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli.manifests import manifests
from embershard.cli.ps import ps
from embershard.cli.worker import worker
from embershard.deploy.attempts import LOST_EXIT_CODE, NO_PROGRESS_EXIT_CODE
from embershard.deploy.manifests.deployment import BadDeployment, Deployment
from embershard.proto.errors import CannotWrite
from embershard.proto.transport.addresses import parse_addresses

JOB = "model: {name: lr}\ndata: {reader: clicks}\n"
VERSIONS = ["1.31", "1.33", "1.36"]


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return str(tmp_path / "job.yaml")


def run(*words):
    result = CliRunner().invoke(manifests, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def kubernetes(job, *words):
    text = run("kubernetes", "--name", "ads", "--job", job, "--image", "reg/embershard:1", *words)
    return {(one["kind"], one["metadata"]["name"]): one for one in YAML(typ="safe").load_all(text)}


def options_of(command):
    """The words that a command of ours takes."""
    import typer

    app = typer.Typer()
    app.command("x")(command)
    return {option for param in typer.main.get_command(app).params for option in param.opts}


def check_words(words):
    """Every option of a command line of ours is one that the command has."""
    command = {"ps": ps, "worker": worker}[words[0]]
    assert {word for word in words if word.startswith("--")} <= options_of(command)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("words", [(), ("--issuer", "ca"), ("--pack", "--data-claim", "d", "--snapshots", "s3://b/x")])
def test_objects_of_kubernetes_are_valid_to_the_letter(words, version, job):
    objects = kubernetes(job, *words)
    own = [one for one in objects.values() if not one["apiVersion"].startswith("cert-manager.io")]
    assert {one["kind"] for one in own} == {
        "ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "Job",
    }  # fmt: skip
    for one in own:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_name_is_text_to_readers_of_earlier_yaml_too(job):
    """kubectl and compose read YAML 1.1, in which no and on are bools."""
    words = ("--name", "no", "--image", "1:30", "--worker-image", "off")
    for more in (("kubernetes", "--job", job, "--namespace", "on", "--issuer", "y"), ("compose",)):
        text, old, new = run(more[0], *more[1:], *words), YAML(typ="safe"), YAML(typ="safe")
        old.version = "1.1"
        assert list(old.load_all(text)) == list(new.load_all(text))


def test_the_validator_finds_a_misspelt_field(job):
    shards = kubernetes(job)["StatefulSet", "ads-shard"]
    shards["spec"]["template"]["spec"]["containers"][0]["startupProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(shards, VERSIONS[0], strict=True)


@pytest.mark.parametrize("issuer", [(), ("--issuer", "ca")])
def test_pods_run_our_commands_and_find_each_other(issuer, job):
    objects = kubernetes(job, "--shards", "3", "--namespace", "ml", *issuer)
    shard = objects["StatefulSet", "ads-shard"]["spec"]
    workers = objects["Job", "ads-worker"]["spec"]
    words = workers["template"]["spec"]["containers"][0]["args"]
    check_words(shard["template"]["spec"]["containers"][0]["args"])
    check_words(words)
    hosts = [address.rpartition(":")[0] for address in parse_addresses(words[words.index("--ps") + 1])]
    assert hosts == [f"ads-shard-{shard}.ads-shards.ml.svc" for shard in range(3)]
    assert shard["serviceName"] == objects["Service", "ads-shards"]["metadata"]["name"]
    assert objects["ConfigMap", "ads-job"]["data"]["job.yaml"] == JOB
    if issuer:
        covered = objects["Certificate", "ads-shard"]["spec"]["dnsNames"]
        assert words[words.index("--tls-server-name") + 1] in covered
        access = YAML(typ="safe").load(objects["ConfigMap", "ads-job"]["data"]["access.yaml"])
        assert access[0]["certificate"] in objects["Certificate", "ads-worker"]["spec"]["uris"]
    else:
        assert "--insecure" in shard["template"]["spec"]["containers"][0]["args"]


def test_a_job_is_read_as_in_training_where_libyaml_is_installed(monkeypatch, tmp_path):
    class Libyaml:
        def __init__(self, *_):
            raise AssertionError("libyaml reads no {1000: topk:0.01}")

    monkeypatch.setattr("ruamel.yaml.main.CParser", Libyaml)
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}compression: {{push: {{at: {{0: none, 1000: topk:0.01}}}}}}\n")
    assert "1000: topk:0.01" in run("kubernetes", "--name", "ads", "--job", str(path), "--image", "x")


def test_workers_of_a_job_with_checkpoints_recover(tmp_path):
    path = tmp_path / "job.yaml"

    def workers_of(text, *words):
        path.write_text(text)
        spec = kubernetes(str(path), *words)["Job", "ads-worker"]["spec"]
        actions = {
            code: rule["action"]
            for rule in spec["podFailurePolicy"]["rules"]
            for code in rule.get("onExitCodes", {}).get("values", ())
        }
        return (
            spec["template"]["spec"]["containers"][0]["args"],
            actions[LOST_EXIT_CODE],
            actions[NO_PROGRESS_EXIT_CODE],
        )

    words, lost, no_progress = workers_of(JOB)
    assert "--recover" not in words
    assert (lost, no_progress) == ("Count", "FailJob")
    words, lost, no_progress = workers_of(JOB + "checkpoint: {folder: s3://a/b}\n")
    check_words(words)
    assert "--recover" in words
    assert (lost, no_progress) == ("Ignore", "FailJob")


def test_shards_without_a_log_have_no_volume_for_it_and_write_the_jobs_checkpoints(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "checkpoint: {folder: s3://a/b}\n")
    objects = kubernetes(str(path), "--durability", "memory", "--service-account", "storage")
    spec = objects["StatefulSet", "ads-shard"]["spec"]
    words = spec["template"]["spec"]["containers"][0]["args"]
    assert words[words.index("--snapshots") + 1] == "s3://a/b"
    assert "--log-dir" not in words
    assert "volumeClaimTemplates" not in spec
    assert objects["PodDisruptionBudget", "ads-shard"]["spec"]["maxUnavailable"] == 0
    for kind, name in (("StatefulSet", "ads-shard"), ("Job", "ads-worker")):
        assert objects[kind, name]["spec"]["template"]["spec"]["serviceAccountName"] == "storage"
        kubernetes_validate.validate(objects[kind, name], VERSIONS[-1], strict=True)
    path.write_text(JOB + "checkpoint: {folder: checkpoints}\n")
    with pytest.raises(BadDeployment, match="URL"):
        kubernetes(str(path))


def test_each_volume_that_is_mounted_exists_and_each_selector_finds_its_pods(job):
    objects = kubernetes(job, "--issuer", "ca", "--data-claim", "data")
    for kind, name in (("StatefulSet", "ads-shard"), ("Job", "ads-worker")):
        spec = objects[kind, name]["spec"]
        pod = spec["template"]["spec"]
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == claims | {volume["name"] for volume in pod["volumes"]}
    labels = objects["StatefulSet", "ads-shard"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        objects["StatefulSet", "ads-shard"]["spec"]["selector"]["matchLabels"],
        objects["Service", "ads-shards"]["spec"]["selector"],
        objects["PodDisruptionBudget", "ads-shard"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy", "ads-shard"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()


@pytest.mark.parametrize("tls", [(), ("--tls", "./keys")])
@pytest.mark.parametrize("durability", ["memory", "log"])
def test_a_compose_file_has_a_service_for_each_shard_and_worker(durability, tls):
    text = run("compose", "--name", "ads", "--image", "e:1", "--shards", "3", "--durability", durability, *tls)
    found = YAML(typ="safe").load(text)
    services = found["services"]
    assert set(services) == {"shard-0", "shard-1", "shard-2", "worker-0", "worker-1"}
    for name, service in services.items():
        check_words(service["command"])
        named = {volume.partition(":")[0] for volume in service.get("volumes", ()) if not volume.startswith(".")}
        assert named <= set(found["volumes"]), name
    words = services["worker-1"]["command"]
    assert [one.rpartition(":")[0] for one in parse_addresses(words[words.index("--ps") + 1])] == [
        "shard-0", "shard-1", "shard-2",
    ]  # fmt: skip


def test_units_of_systemd_have_their_shards_ports_and_credentials(tmp_path):
    words = [
        "--name",
        "ads",
        "--shards",
        "4",
        "--first",
        "2",
        "--count",
        "2",
        "--host",
        "10.0.0.2",
        "--tls",
        "/etc/keys",
    ]
    run("systemd", *words, "--snapshots", "/mnt/a b", "--output", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "embershard-ads-2.service", "embershard-ads-3.service", "embershard-ads.target",
    ]  # fmt: skip
    unit = (tmp_path / "embershard-ads-3.service").read_text()
    (command,) = (line.removeprefix("ExecStart=") for line in unit.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(command)[1:]
    check_words(words)
    assert words[words.index("--listen") + 1] == "10.0.0.2:7701"
    assert words[words.index("--shard") + 1] == "3"
    assert words[words.index("--snapshots") + 1] == "/mnt/a b"
    for name in ("tls.crt", "tls.key", "ca.crt", "crl.pem"):
        assert f"LoadCredential={name}:/etc/keys/{name}\n" in unit
    assert "\nSetCredential=crl.pem:\\n\n" in unit  # in place of a file that may be missing


def test_what_a_user_writes_is_no_specifier_or_variable_of_systemd(tmp_path):
    text = run("systemd", "--name", "ads", "--shards", "1", "--access", "/a", "--snapshots", '/a%i$HOME"')
    assert '--snapshots "/a%%i$$HOME\\""' in text


def test_a_service_that_others_reach_needs_certificates_and_may_write_its_snapshots():
    with pytest.raises(BadDeployment, match="certificates"):
        run("systemd", "--name", "ads", "--shards", "1", "--host", "10.0.0.1")
    text = run(
        "systemd", "--name", "ads", "--shards", "1", "--host", "::1", "--access", "/a", "--snapshots", "/mnt/a$x",
        "--snapshots", "s3://b", "--snapshots", "file:///mnt/b%c",
    )  # fmt: skip
    assert " --listen [::1]:7700 " in text
    assert [line for line in text.splitlines() if line.startswith("ReadWritePaths")] == [
        "ReadWritePaths=/mnt/a$x", "ReadWritePaths=/mnt/b%%c",
    ]  # fmt: skip


def test_a_service_that_nobody_could_use_is_refused():
    """Its token on loopback is for its user, whom nobody else is."""
    with pytest.raises(BadDeployment, match="--access"):
        run("systemd", "--name", "ads", "--shards", "1")
    assert "--access %d/access.yaml" in run("systemd", "--name", "ads", "--shards", "1", "--access", "/a")


def test_no_two_services_whose_users_differ_share_a_folder():
    lines = run("systemd", "--name", "ads", "--shards", "2", "--access", "/a").splitlines()
    folders = [line for line in lines if line.startswith(("StateDirectory=", "CacheDirectory="))]
    assert len(set(folders)) == 4
    assert len({line for line in lines if "NUMBA_CACHE_DIR=%C/embershard/ads/" in line}) == 2


def test_fewer_nodes_have_more_cores_each_and_a_users_variables_stay_words():
    text = run("slurm", "--name", "ads", "--job", "j", "--nodes", "2", "--checkpoints", "$run/$HOME", "--cpus", "3")
    assert "#SBATCH --cpus-per-task=6\n" in text
    assert "'checkpoint.folder=$run/$HOME'" in text


def test_paths_of_a_compose_file_are_no_names_of_volumes():
    text = run("compose", "--name", "ads", "--image", "e:1", "--job", "$job.yaml", "--tls", "keys")
    volumes = YAML(typ="safe").load(text)["services"]["worker-0"]["volumes"]
    assert {"./$$job.yaml:/job/job.yaml:ro", "./keys:/keys:ro"} <= set(volumes)  # nor variables


def test_a_batch_script_trains_the_job_on_its_nodes():
    text = run("slurm", "--name", "ads", "--job", "my job.yaml", "--shards", "2", "--workers", "3", "--cpus", "4")
    assert "#SBATCH --nodes=5\n" in text
    assert "#SBATCH --cpus-per-task=4\n" in text
    words = shlex.split(text.splitlines()[-1])
    assert words[:6] == ["exec", "embershard", "train", "my job.yaml", "--engine", "slurm"]
    assert 'checkpoint.folder="$run/checkpoints"' in words


@pytest.mark.parametrize(
    "words",
    [
        ("kubernetes", "--name", "Ads", "--image", "e"),
        ("kubernetes", "--name", "ads", "--image", "e", "--durability", "memory"),
        ("kubernetes", "--name", "a" * 41, "--image", "e"),
        ("kubernetes", "--name", "ads", "--image", ""),
        ("kubernetes", "--name", "ads", "--image", "e", "--namespace", "My NS"),
        ("kubernetes", "--name", "ads", "--image", "a b"),
        ("kubernetes", "--name", "ads", "--image", "e:\N{LATIN SMALL LETTER U WITH DIAERESIS}"),
        ("kubernetes", "--name", "ads", "--image", "e", "--worker-image", "a\nb"),
        ("kubernetes", "--name", "ads", "--image", "e", "--storage", "10 apples"),
        ("kubernetes", "--name", "ads", "--image", "e", "--data-claim", "A_b"),
        ("kubernetes", "--name", "ads", "--image", "e", "--issuer", "a/b"),
        ("kubernetes", "--name", "ads", "--image", "e", "--service-account", "a\nb"),
        ("kubernetes", "--name", "ads", "--image", "e", "--issuer", "a..b"),
        ("kubernetes", "--name", "ads", "--image", "e", "--storage", "20ki"),
        ("kubernetes", "--name", "ads", "--image", "e", "--storage", "0Gi"),
        ("kubernetes", "--name", "ads", "--image", "e", "--workers", "65536"),
        ("kubernetes", "--name", "ads", "--image", "e", "--memory", "9" * 20),
        ("kubernetes", "--name", "ads", "--image", "e", "--worker-cpus", "9" * 20),
        ("slurm", "--name", "ads", "--job", "j", "--executable", "a'b"),
        ("slurm", "--name", "ads", "--job", "j", "--executable", ""),
        ("systemd", "--name", "ads", "--shards", "2", "--first", "2"),
        ("systemd", "--name", "ads", "--shards", "2", "--first", "1", "--count", "2"),
        ("systemd", "--name", "ads", "--shards", "2", "--executable", "/a\nExecStartPre=/b"),
        ("systemd", "--name", "ads", "--shards", "2", "--access", "/a\nUser=root"),
        ("systemd", "--name", "ads", "--shards", "2", "--executable", ""),
        ("systemd", "--name", "ads", "--shards", "2", "--executable", "bin/embershard"),
        ("systemd", "--name", "ads", "--shards", "2", "--executable", "-/bin/embershard"),
        ("systemd", "--name", "ads", "--shards", "2", "--host", "10.0.0.1 ", "--tls", "keys"),
        ("systemd", "--name", "ads", "--shards", "2", "--host", "[::1]"),
        ("systemd", "--name", "ads", "--shards", "2", "--host", "10.0.0.256", "--tls", "keys"),
        ("systemd", "--name", "ads", "--shards", "2", "--snapshots", "mnt/a"),
        ("slurm", "--name", "ads", "--job", "j", "--checkpoints", "null"),
        ("compose", "--name", "-ads", "--image", "e"),
        ("compose", "--name", "ads", "--image", ""),
        ("compose", "--name", "ads", "--image", "e", "--workers", str(10**9)),
        ("compose", "--name", "ads", "--image", "e", "--job", ""),
        ("compose", "--name", "ads", "--image", "e", "--job", "a:b.yaml"),
        ("compose", "--name", "ads", "--image", "e", "--tls", "keys\n"),
    ],
)
def test_what_no_engine_could_start_is_an_error_that_says_why(words, job):
    extra = ("--job", job) if words[0] == "kubernetes" else ()
    with pytest.raises(BadDeployment):
        run(*words, *extra)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--first", "5"), "--first 5: there are 2 shards, from 0 to 1"),
        (("--first", "1", "--count", "2"), "--first 1 --count 2: there are 2 shards, from 0 to 1"),
        (("--snapshots", "/home/me/kept"), "snapshots /home/me/kept: a service cannot see the /home of this machine"),
        (("--snapshots", "file:///tmp"), "snapshots /tmp: a service cannot see the /tmp of this machine"),
    ],
)
def test_shards_that_are_not_there_and_folders_that_a_service_cannot_see_are_named(words, said):
    with pytest.raises(BadDeployment, match=f"^{re.escape(said)}"):
        run("systemd", "--name", "ads", "--shards", "2", "--access", "/a", *words)
    assert "ReadWritePaths=/tmpfs" in run(
        "systemd", "--name", "ads", "--shards", "2", "--access", "/a", "--snapshots", "/tmpfs"
    )


@pytest.mark.parametrize("settings", ["strategy: hybrid\n", "strategy: local\n", "dense: {mode: fsdp}\n"])
def test_a_job_whose_workers_would_not_find_each_other_in_pods_is_refused(settings, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB + settings)
    with pytest.raises(BadDeployment, match="strategy ps"):
        kubernetes(str(tmp_path / "job.yaml"))


def test_a_job_file_that_is_missing_and_a_folder_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(BadDeployment):
        kubernetes(str(tmp_path / "none.yaml"))
    (tmp_path / "rows.csv").write_text("label,user\n1,2\n")
    with pytest.raises(BadDeployment):
        kubernetes(str(tmp_path / "rows.csv"))
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="--output"):
        run("systemd", "--name", "ads", "--shards", "1", "--access", "/a", "--output", str(tmp_path / "file"))


def test_a_unit_that_the_disk_does_not_take_leaves_the_one_before(tmp_path, monkeypatch):
    words = ("systemd", "--name", "ads", "--shards", "1", "--access", "/a", "--output", str(tmp_path))
    run(*words)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def full(path, text, encoding):
        path.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CannotWrite, match="No space left"):
        run(*words)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_shard_leaves_memory_to_what_is_no_table():
    assert Deployment(name="a", shards=1, memory=6000).memory_of_tables == 5000
    with pytest.raises(BadDeployment):
        Deployment(name="a", shards=1, memory=1)


def test_the_command_is_found():
    assert "manifests" in CliRunner().invoke(cli.app, ["--help"]).stdout
