#!/bin/sh
# Reports what is missing, then installs it.
#   scripts/bootstrap.sh lab    the system packages a lab needs (Debian, Ubuntu); sudo only if something is missing
#   scripts/bootstrap.sh browser  chromium, for the test of the chat page
#   scripts/bootstrap.sh noble  the keys of Ubuntu's archive, which a lab of Ubuntu 24.04 hosts needs besides
#   scripts/bootstrap.sh venv   .venv with all that a controller needs, pinned by constraints.txt, and a link by which
#                               Ansible finds this checkout as the collection nanofleet.fleet
# Settings: PYTHON (which Python makes the venv), TORCH_INDEX_URL (where torch's CPU build comes from).
# Done before, it does nothing and takes no time.
set -eu

cd "$(dirname "$0")/.."

die() {
    printf '%s\n' "bootstrap: $*" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

# Where Debian keeps podman's helpers and the tools of root, which a plain user's PATH may lack.
HELPERS=${BOOTSTRAP_HELPERS:-"/usr/lib/podman /usr/libexec/podman"}
PATH=$PATH${BOOTSTRAP_PATH-:/usr/local/sbin:/usr/sbin:/sbin}

have_helper() {
    for folder in $HELPERS; do
        [ -x "$folder/$1" ] && return 0
    done
    return 1
}

# install_packages WHY PACKAGE...
install_packages() {
    why=$1
    shift
    [ $# -gt 0 ] || return 0
    command="apt-get install --yes --no-install-recommends $*"
    have apt-get || die "$why needs $*; this machine has no apt-get, so install them with its own package manager"
    as_root=
    if [ "$(id -u)" -ne 0 ]; then
        have sudo || die "$why needs $*; there is no sudo here, so type as root: apt-get update && $command"
        as_root=sudo
    fi
    echo "bootstrap: $why needs $*; installing${as_root:+ with sudo}"
    DEBIAN_FRONTEND=noninteractive
    export DEBIAN_FRONTEND
    $as_root apt-get update -qq || die "apt-get update failed: is a package mirror within reach?"
    # Packages are single words.
    # shellcheck disable=SC2086
    $as_root $command -qq >/dev/null || die "these could not be installed: $*. Type it to see why: ${as_root:+sudo }$command"
}

lab() {
    [ "$(uname -s)" = Linux ] || die "a lab needs Linux; real hosts work from here all the same (see inventory/sample)"
    set --
    have podman || set -- "$@" podman
    have runc || set -- "$@" runc
    have_helper netavark || set -- "$@" netavark
    have_helper aardvark-dns || set -- "$@" aardvark-dns
    have iptables || set -- "$@" iptables
    have nft || set -- "$@" nftables
    have mmdebstrap || set -- "$@" mmdebstrap
    [ -e "${BOOTSTRAP_KEYRING:-/usr/share/keyrings/debian-archive-keyring.gpg}" ] || set -- "$@" debian-archive-keyring
    have rsync || set -- "$@" rsync
    have ssh || set -- "$@" openssh-client
    have ip || set -- "$@" iproute2
    if grep -qs '^ID=ubuntu' /etc/os-release; then
        have crun || set -- "$@" crun
    fi
    install_packages "a lab" "$@"
}

# Ubuntu's package chromium is only a link to a snap: tests of the page are skipped there unless a browser exists.
browser() {
    have chromium || have chromium-browser || have google-chrome || grep -qs '^ID=ubuntu' /etc/os-release ||
        install_packages "the test of the chat page" chromium
}

# Debian releases without a package ubuntu-keyring take Ubuntu's own, known by its sha256.
UBUNTU_KEYRING=http://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb
UBUNTU_KEYRING_SHA256=36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8

noble() {
    [ ! -e "${BOOTSTRAP_UBUNTU_KEYRING:-/usr/share/keyrings/ubuntu-archive-keyring.gpg}" ] || return 0
    if apt-get install --simulate ubuntu-keyring >/dev/null 2>&1; then
        install_packages "a lab of Ubuntu 24.04 hosts" ubuntu-keyring
        return
    fi
    as_root=
    [ "$(id -u)" -eq 0 ] || as_root=sudo
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    echo "bootstrap: a lab of Ubuntu 24.04 hosts needs the keys of Ubuntu's archive; fetching ubuntu-keyring"
    "$(find_python)" -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' \
        "$UBUNTU_KEYRING" "$folder/keys.deb" || die "Ubuntu's archive cannot be reached, so no Ubuntu host can be made here"
    echo "$UBUNTU_KEYRING_SHA256  $folder/keys.deb" | sha256sum --check --quiet || die "ubuntu-keyring has another sha256"
    $as_root dpkg --install "$folder/keys.deb" >/dev/null
}

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

find_python() {
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if have "$python" && fits "$python"; then
            echo "$python"
            return
        fi
    done
    for python in ${PYTHON:-python3}; do
        have "$python" && die "Python 3.11 to 3.13 is needed, and $python is $("$python" -V 2>&1); name another with PYTHON=python3.12"
    done
    die "Python 3.11 to 3.13 is needed, and ${PYTHON:-python3} is not here; on Debian and Ubuntu: apt-get install python3 python3-venv"
}

# The checkout is the collection nanofleet.fleet: ansible.cfg looks for it here, and so do the console and the tests.
COLLECTIONS=.ansible/collections

collection() {
    link=$COLLECTIONS/ansible_collections/nanofleet/fleet
    if ! [ "$link" -ef . ]; then
        mkdir -p "${link%/*}"
        rm -rf "$link"
        ln -s ../../../.. "$link"
    fi
    for packages in .venv/lib/python3*/site-packages; do
        path=$packages/nanofleet_collection.pth
        [ ! -d "$packages" ] || [ "$(cat "$path" 2>/dev/null || true)" = "$PWD/$COLLECTIONS" ] ||
            printf '%s\n' "$PWD/$COLLECTIONS" >"$path"
    done
}

venv() {
    stamp=.venv/.nanofleet
    digest=$(cat pyproject.toml constraints.txt | cksum)
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$digest" ]; then
        collection
        return
    fi
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        install_packages "a virtual environment" python3-venv
        "$python" -c 'import ensurepip, venv' || die "$python still has no ensurepip: install the venv package of that Python"
    fi
    have rsync || install_packages "copying to hosts" rsync
    have ssh || install_packages "reaching hosts" openssh-client
    if [ ! -x .venv/bin/python ] || ! fits .venv/bin/python; then
        echo "bootstrap: making .venv with $("$python" -V)"
        "$python" -m venv --clear .venv
    fi
    set -- -qq --disable-pip-version-check --constraint constraints.txt --editable '.[controller,train,dev]'
    torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
    if [ "$(uname -s)" = Linux ] && [ -n "$torch" ]; then
        # On Linux the index everyone uses has the CUDA build alone, gigabytes that no CPU needs. The local tag
        # makes the CPU build the higher version, so pip takes it wherever it is on offer.
        if [ -n "${TORCH_INDEX_URL:-}" ] || ! .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --dry-run --no-deps "torch==$torch+cpu" >/dev/null 2>&1; then
            # In a file that only this user reads: the URL may hold a password, and every user sees a command line.
            index=$(mktemp)
            trap 'rm -f "$index"' EXIT
            printf -- '--extra-index-url %s\n' "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}" >"$index"
            set -- "$@" --requirement "$index"
        fi
    fi
    echo "bootstrap: installing the controller's packages into .venv (a few minutes, once)"
    .venv/bin/python -m pip install "$@" || die "pip could not install the packages; its last lines above say which and why"
    collection
    printf '%s\n' "$digest" >"$stamp"
}

[ $# -gt 0 ] || die "no part is named. Fix: scripts/bootstrap.sh lab, browser, noble or venv"
for part in "$@"; do
    case $part in
        lab) lab ;;
        browser) browser ;;
        noble) noble ;;
        venv) venv ;;
        *) die "unknown part $part. Parts: lab, browser, noble, venv" ;;
    esac
done
