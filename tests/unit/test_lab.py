"""The lab's decisions, and what bootstrap.sh says: no container is started here."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.nanofleet.fleet.plugins.module_utils import lab_plan as lab

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "lab"
BOOTSTRAP = ROOT / "scripts" / "bootstrap.sh"


# The subnet


def test_a_subnet_is_the_same_for_the_same_name_and_free():
    first = lab.lab_free_subnet("lab", [])
    assert first == lab.lab_free_subnet("lab", ["default", "192.0.2.0/24", "fd00::/64"])
    assert ipaddress.ip_network(first).subnet_of(ipaddress.ip_network("10.88.0.0/13"))


def test_a_subnet_that_is_routed_or_lies_in_a_routed_one_is_not_taken():
    first = lab.lab_free_subnet("lab", [])
    second = lab.lab_free_subnet("lab", [first])
    assert second != first
    wide = str(ipaddress.ip_network(first).supernet(new_prefix=16))
    assert not ipaddress.ip_network(lab.lab_free_subnet("lab", [wide])).overlaps(ipaddress.ip_network(wide))
    host_route = str(ipaddress.ip_network(first)[7])
    assert lab.lab_free_subnet("lab", [host_route]) != first


def test_two_names_start_their_search_in_different_places():
    assert len({lab.lab_free_subnet(name, []) for name in ("lab", "lab2", "test", "molecule-default")}) == 4


def test_a_vpn_that_routes_all_of_10_leaves_labs_their_pool():
    assert lab.lab_free_subnet("lab", ["10.0.0.0/8"]) == lab.lab_free_subnet("lab", [])


def test_no_room_left_is_a_sentence():
    with pytest.raises(ValueError, match="take labs down"):
        lab.lab_free_subnet("lab", [f"10.{b}.0.0/16" for b in range(89, 99)])


def rendered(name: str, **given: object) -> object:
    """A variable of the role, with `given` beside those of its vars/main.yml."""
    loader = DataLoader()
    variables = loader.load_from_file(str(ROLE / "vars" / "main.yml"), trusted_as_template=True)
    return Templar(loader=loader, variables={**variables, **given}).template(variables[name])


@pytest.mark.parametrize(("name", "subnets"), [("a", ["10.90.1.0/24"]), ("v6", []), ("b", [])])
def test_the_subnet_of_a_lab_is_read_from_podman(name: str, subnets: list[str]) -> None:
    networks = [
        {"name": "nanofleet-a", "subnets": [{"subnet": "10.90.1.0/24", "gateway": "10.90.1.1"}]},
        {"name": "none"},
        {"name": "nanofleet-v6", "subnets": None},
    ]
    listed = {"stdout": json.dumps(networks)}
    assert rendered("__lab_current", lab_name=name, __lab_networks=listed) == subnets


# The hosts


def test_each_host_has_an_address_and_cores_of_its_own():
    plan = lab.lab_plan("x", 2, "10.90.1.0/24", 2, [0, 1, 2, 3])
    assert [host["name"] for host in plan] == ["x-1", "x-2"]
    assert [host["address"] for host in plan] == ["10.90.1.11", "10.90.1.12"]
    assert [host["mac"] for host in plan] == ["02:00:0a:5a:01:0b", "02:00:0a:5a:01:0c"]
    assert [host["cpuset"] for host in plan] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("count", "cores", "cpus", "expected"),
    [(3, 1, [0, 1], ["0", "1", "0"]), (2, 4, [0, 1], ["0,1", "0,1"]), (2, 1, [4, 6], ["4", "6"])],
)
def test_too_few_cores_are_shared_in_turn(count, cores, cpus, expected):
    assert [host["cpuset"] for host in lab.lab_plan("x", count, "10.90.1.0/24", cores, cpus)] == expected


def test_two_hundred_hosts_fit_the_subnet():
    addresses = {host["address"] for host in lab.lab_plan("x", 200, "10.90.1.0/24", 1, [0])}
    assert len(addresses) == 200
    assert "10.90.1.255" not in addresses


def test_this_machines_rights_are_read_from_proc():
    status = "Name:\tx\nCapBnd:\t000001fffeffffff\nCpus_allowed_list:\t0-2,5\n"
    assert rendered("__lab_can_raise_limits", __lab_process=status) is False
    assert rendered("__lab_can_raise_limits", __lab_process="CapBnd:\t000001ffffffffff\n") is True
    assert rendered("__lab_can_raise_limits", __lab_process="Name:\tx\n") is True


# Whose containers they are


def test_containers_of_the_name_are_found_with_their_owner():
    containers = [
        {"Names": ["x-1"], "Labels": {"nanofleet.lab": "x", "nanofleet.state": "/a/.lab/x"}},
        {"Names": ["x-2"], "Labels": None},
        {"Names": ["x-2-1"], "Labels": {"nanofleet.lab": "x-2", "nanofleet.state": "/a/.lab/x-2"}},
        {"Names": ["other"], "Labels": {}},
    ]
    assert lab.lab_containers(containers, "x") == [
        {"name": "x-1", "owner": "/a/.lab/x"},
        {"name": "x-2", "owner": ""},
    ]
    assert lab.lab_containers(None, "x") == []


def test_stopped_hosts_are_distinguished_from_those_that_are_up() -> None:
    states = {"x-1": "running", "x-2": "exited", "x-3": "paused", "x-4": "created"}
    containers = [{"Names": [name], "State": state} for name, state in states.items()]
    for listed, stopped in ((containers, ["x-2", "x-4"]), (None, [])):
        assert rendered("__lab_stopped", __lab_containers={"stdout": json.dumps(listed)}) == stopped


def test_failures_name_the_host_and_its_words():
    results = [
        {"failed": False, "item": {"name": "x-1"}},
        {"failed": True, "item": {"name": "x-2"}, "stderr": "no such image\n"},
        {"failed": True, "ansible_loop_var": "host", "host": {"name": "x-3"}, "stderr": "no room"},
        {"failed": True, "msg": "odd"},
    ]
    assert lab.lab_failures(results) == "x-2: no such image; x-3: no room; odd"


# The link and the mirror


@pytest.mark.parametrize(
    ("rate", "burst"),
    [("none", "0"), ("1gbit", "256kb"), ("100mbit", "256kb"), ("2.5gbit", "640kb"), ("64kbit", "32kb")],
)
def test_the_bucket_grows_with_the_rate(rate, burst):
    assert lab.lab_burst(rate) == burst


def test_a_rate_that_is_none_is_refused():
    with pytest.raises(ValueError, match="fast is not a rate"):
        lab.lab_burst("fast")


def test_the_machines_own_mirror_is_taken_unless_it_is_the_usual():
    def mirror(distribution: str, listed: str, asked: str = "") -> object:
        given = {"lab_distribution": distribution, "__lab_list_mirrors": f"printf '{listed}'"}
        return rendered("__lab_mirror", lab_mirror=asked, **given)

    local = r"http://mirror.example/debian-security/\nhttp://mirror.example/debian/\n"
    assert mirror("trixie", local) == "http://mirror.example/debian"
    assert mirror("noble", local) == ""
    assert mirror("trixie", r"http://deb.debian.org/debian/\n") == ""
    assert mirror("trixie", "") == ""
    assert mirror("trixie", local, "http://mine") == "http://mine"


# The role's files


@pytest.mark.parametrize("hosts", [1, 3])
def test_the_inventory_has_one_coordinator_and_checks_host_keys(tmp_path, hosts):
    data = render(
        "hosts.yml.j2",
        tmp_path,
        lab_name="x",
        lab_cores="2",
        __lab_plan=lab.lab_plan("x", hosts, "10.90.1.0/24", 2, [0]),
        __lab_user="ops",
        __lab_key="/r/.lab/x/id_ed25519",
        __lab_known_hosts="/r/.lab/x/known_hosts",
        __lab_control_dir="/r/.lab/x/cp",
    )
    inventory = yaml.safe_load(data)
    assert inventory["coordinator"]["hosts"] == {"x-1": {"ansible_host": "10.90.1.11"}}
    assert list(inventory["workers"]["hosts"]) == ["x-2", "x-3"][: hosts - 1]
    variables = inventory["fleet"]["vars"]
    assert variables["fleet_threads"] == 2
    assert "StrictHostKeyChecking=yes" in variables["ansible_ssh_common_args"]


def render(template: str, tmp_path: Path, **values: object) -> str:
    """Render one of the role's templates as the template module would."""
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    text = trust_as_template((ROLE / "templates" / template).read_text())
    return Templar(loader=DataLoader(), variables=json.loads(json.dumps(values))).template(text)


# What a person reads who asked for something that cannot be


@pytest.mark.processes
@pytest.mark.parametrize(
    ("knob", "sentence"),
    [
        ("lab_hosts=two", "lab_hosts is 'two': it takes a whole number"),
        ("lab_hosts=0", "lab_hosts=0 must be a whole number from 1 to 200"),
        ("lab_cores=0", "lab_cores=0 must be a whole number of at least 1"),
        ("lab_cpu_share=2", "lab_cpu_share=2 must be a number from 0.1 to 1"),
        ("lab_link=fast", "lab_link=fast must be the rate of the links"),
        ("lab_distribution=sid", "it takes bookworm or trixie or noble"),
        ("lab_name=My_Lab", "lab_name=My_Lab cannot be part of a host name"),
        ("lab_state=sideways", "it takes up or down"),
        ("lab_memory=lots", "lab_memory=lots must be the memory of each host"),
    ],
)
def test_a_bad_knob_gets_a_sentence(knob, sentence):
    done = playbook("-e", knob)
    assert done.returncode != 0
    assert sentence in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr


# What Ansible's local connection cannot do without.
SHELL = ("sh", "echo", "mkdir", "chmod", "rm", "sleep", "python3")


@pytest.mark.processes
def test_without_podman_a_lab_shows_what_to_type(tmp_path):
    done = playbook("-e", "lab_name=nopodman", path=tools(tmp_path, *SHELL, "uname", "id"))
    assert done.returncode != 0
    printed = " ".join(done.stdout.split())
    assert "podman is not installed on this machine" in printed
    assert "scripts/bootstrap.sh lab" in printed


def playbook(*args: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    import sys

    env = os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "400"}
    if path:
        env["PATH"] = path
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "lab.yml", *args]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def tools(folder: Path, *names: str, **scripts: str) -> str:
    """A PATH that holds these tools of the machine and these scripts, and nothing else."""
    for name in names:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    for name, body in scripts.items():
        tool = folder / name.replace("_", "-")
        tool.write_text("#!/bin/sh\n" + body)
        tool.chmod(0o755)
    return str(folder)


def bootstrap(part: str, path: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    script = (cwd or ROOT) / "scripts" / "bootstrap.sh"
    return subprocess.run(
        ["/bin/sh", "-u", str(script), part],
        env={"PATH": path, "BOOTSTRAP_PATH": "", "BOOTSTRAP_HELPERS": "/nowhere", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


BARE = ("dirname", "grep", "cat", "sed", "cksum")


def test_without_sudo_the_missing_packages_and_the_command_are_named(tmp_path):
    path = tools(tmp_path, *BARE, "uname", id="echo 1000\n", apt_get="exit 1\n")
    done = bootstrap("lab", path)
    assert done.returncode == 1
    assert "a lab needs podman runc netavark" in done.stderr
    assert "there is no sudo here, so type as root: apt-get update && apt-get install" in done.stderr


def test_packages_are_installed_with_sudo_and_announced_first(tmp_path):
    log = tmp_path / "log"
    path = tools(tmp_path, *BARE, "uname", id="echo 1000\n", apt_get="exit 1\n", sudo=f'echo "$@" >>{log}\n')
    done = bootstrap("lab", path)
    assert done.returncode == 0, done.stderr
    assert "installing with sudo" in done.stdout
    assert "apt-get install --yes --no-install-recommends podman runc" in log.read_text()


def test_with_all_there_nothing_is_reported_or_done(tmp_path):
    there = dict.fromkeys(
        ("podman", "runc", "crun", "iptables", "nft", "mmdebstrap", "rsync", "ssh", "ip"), "exit 1\n"
    )
    helpers = tmp_path / "helpers"
    helpers.mkdir()
    tools(helpers, netavark="exit 1\n", aardvark_dns="exit 1\n")
    path = tools(tmp_path, *BARE, "uname", **there)
    done = bootstrap("lab", path, BOOTSTRAP_HELPERS=str(helpers), BOOTSTRAP_KEYRING=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_lab_on_macos_is_refused_with_a_way_on(tmp_path):
    done = bootstrap("lab", tools(tmp_path, *BARE, uname="echo Darwin\n"))
    assert done.returncode == 1
    assert "a lab needs Linux; real hosts work from here" in done.stderr


def test_an_old_python_is_named(tmp_path):
    old = 'case $1 in -V) echo "Python 3.9.2" ;; *) exit 1 ;; esac\n'
    done = bootstrap("venv", tools(tmp_path, *BARE, "uname", python3=old), cwd=checkout(tmp_path))
    assert done.returncode == 1
    assert "Python 3.11 to 3.13 is needed, and python3 is Python 3.9.2" in done.stderr


def test_a_venv_that_fits_is_left_alone(tmp_path):
    here = checkout(tmp_path)
    (here / ".venv/bin").mkdir(parents=True)
    python = here / ".venv/bin/python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    sums = subprocess.run(
        "cat pyproject.toml constraints.txt | cksum", shell=True, cwd=here, capture_output=True, text=True
    )
    (here / ".venv/.nanofleet").write_text(sums.stdout)
    packages = here / ".venv/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    done = bootstrap("venv", tools(tmp_path, *BARE, "mkdir", "rm", "ln"), cwd=here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    link = here / ".ansible/collections/ansible_collections/nanofleet/fleet"
    assert link.resolve() == here.resolve()
    assert (packages / "nanofleet_collection.pth").read_text() == f"{here}/.ansible/collections\n"
    again = tmp_path / "again"
    again.mkdir()
    assert bootstrap("venv", tools(again, *BARE), cwd=here).returncode == 0, "nothing is left to be made"


def test_a_link_to_another_checkout_is_replaced(tmp_path):
    here, link = checkout(tmp_path), ".ansible/collections/ansible_collections/nanofleet/fleet"
    (here / link).parent.mkdir(parents=True)
    (here / link).symlink_to(tmp_path)
    (here / ".venv/bin").mkdir(parents=True)
    (here / ".venv/bin/python").symlink_to("/bin/true")
    sums = subprocess.run(
        "cat pyproject.toml constraints.txt | cksum", shell=True, cwd=here, capture_output=True
    )
    (here / ".venv/.nanofleet").write_bytes(sums.stdout)
    assert bootstrap("venv", tools(tmp_path, *BARE, "mkdir", "rm", "ln"), cwd=here).returncode == 0
    assert (here / link).resolve() == here.resolve()
    assert (tmp_path / "checkout").exists(), "the other one is left as it is"


def checkout(folder: Path) -> Path:
    """A folder with what bootstrap.sh reads."""
    here = folder / "checkout"
    (here / "scripts").mkdir(parents=True)
    shutil.copy(BOOTSTRAP, here / "scripts")
    (here / "pyproject.toml").write_text("[project]\n")
    (here / "constraints.txt").write_text("torch==2.13.0\n")
    return here
