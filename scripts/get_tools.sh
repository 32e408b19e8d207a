#!/usr/bin/env bash
# Makes real servers available to the tests in .tools/usr/bin, without touching the system.
#
#   scripts/get_tools.sh                        what TOOLS names, by default prometheus and promtool
#   TOOLS="promtool" scripts/get_tools.sh       only these
#
# TOOLS lists Debian packages, each with the program it brings where that has another name:
# "package" or "package=program". A program that is on PATH is linked. On Debian every other one is
# downloaded with apt's own tools, signatures checked, from the mirror that the machine's sources name,
# and unpacked here; apt's lists and cache of the system stay as they are, and root is not needed.
# Whatever is there already is left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TOOLS="${TOOLS:-prometheus promtool}"
SUITE="${SUITE:-trixie}" # The first Debian release whose promtool knows everything that the tests use.
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
ROOT="$PWD/.tools"
BIN="$ROOT/usr/bin"

fail() {
    printf 'get_tools: %s\n' "$*" >&2
    exit 1
}

# The programs' directory itself may be on PATH: a link must not point at itself.
on_path() {
    local directory
    local IFS=:
    for directory in $PATH; do
        if [[ "$directory" != "$BIN" && -x "$directory/$1" && ! -d "$directory/$1" ]]; then
            printf '%s\n' "$directory/$1"
            return 0
        fi
    done
    return 1
}

# What apt's indexes say; a machine on which `apt-get update` never ran has none, so then the source files.
mirrors() {
    apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null || true
    apt-get indextargets --format '$(SITE)' 2>/dev/null || true
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
        sed -nE 's/^[[:space:]]*deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+).*/\2/p' || true
    cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
        sed -nE 's/^[Uu][Rr][Ii][Ss]:[[:space:]]*([^[:space:]]+).*/\1/p' || true
}

# The first one that ends like a mirror of Debian itself, so neither the security archive nor a vendor's.
debian_mirror() {
    mirrors | sed 's#/*$##' | grep -v security | grep -m 1 -E '/debian$'
}

explain() {
    fail "cannot fetch$(printf ' %s' "$@") here: $1 is not on PATH, and this machine has no Debian mirror in its package sources.
Install Prometheus (https://prometheus.io/download/, or your system's package 'prometheus') so that
these programs are on PATH, then run 'make tools' again."
}

# Settings of apt for one run in a directory of its own. The system's settings (proxy, certificates) are
# read first and stay; what would reach out of the directory is replaced.
write_apt_settings() {
    local state="$1" mirror="$2"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/none"
    : >"$state/status"
    printf 'deb [signed-by=%s] %s %s main\n' "$KEYRING" "$mirror" "$SUITE" >"$state/sources.list"
    cat >"$state/apt.conf" <<SETTINGS
Dir::Etc::SourceList "$state/sources.list";
Dir::Etc::SourceParts "$state/none";
Dir::Etc::Preferences "$state/none/preferences";
Dir::Etc::PreferencesParts "$state/none";
Dir::State "$state";
Dir::State::Lists "$state/lists";
Dir::State::Status "$state/status";
Dir::Cache "$state/cache";
Dir::Log "$state/none";
APT::Default-Release "";
APT::Sandbox::User "";
APT::Get::List-Cleanup "false";
Acquire::Languages "none";
Acquire::Retries "3";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
SETTINGS
}

# Downloads one package and moves its program into place in one step, so that an interrupted run leaves none.
install_from_debian() {
    local state="$1" package="$2" program="$3"
    mkdir -p "$state/$package/files"
    (cd "$state/$package" && apt-get -q -c "$state/apt.conf" download "$package")
    dpkg -x "$state/$package"/*.deb "$state/$package/files"
    local found="$state/$package/files/usr/bin/$program"
    [[ -x "$found" ]] || fail "Debian's package $package has no usr/bin/$program: write it as PACKAGE=PROGRAM in TOOLS"
    "$found" --version >/dev/null 2>&1 || fail "$program from Debian $SUITE does not run on this system"
    mv -f "$found" "$BIN/$program"
}

main() {
    local tool program missing=() path
    mkdir -p "$BIN"
    for tool in $TOOLS; do
        program="${tool#*=}"
        if [[ -x "$BIN/$program" ]]; then
            continue
        elif path="$(on_path "$program")"; then
            ln -sfn "$path" "$BIN/$program"
            echo "get_tools: $program is installed, using $path"
        else
            missing+=("$tool")
        fi
    done
    if ((${#missing[@]} == 0)); then
        echo "get_tools: everything is there ($TOOLS)"
        return
    fi

    local mirror state
    command -v apt-get >/dev/null && command -v dpkg >/dev/null && [[ -r "$KEYRING" ]] || explain "${missing[@]}"
    mirror="$(debian_mirror)" || explain "${missing[@]}"
    state="$(mktemp -d "$ROOT/apt.XXXXXX")"
    # shellcheck disable=SC2064  # The directory's name is wanted as it is now.
    trap "rm -rf '$state'" EXIT
    write_apt_settings "$state" "$mirror"
    echo "get_tools: reading the package list of Debian $SUITE"
    apt-get -q -c "$state/apt.conf" update || fail "apt-get could not read Debian $SUITE; is there a network?"
    for tool in "${missing[@]}"; do
        program="${tool#*=}"
        install_from_debian "$state" "${tool%%=*}" "$program"
        echo "get_tools: $program is in .tools/usr/bin"
    done
}

main
