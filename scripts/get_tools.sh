#!/usr/bin/env bash
# Makes real servers and a browser available to the tests in .tools/usr/bin, without touching the system; but for Chromium.
#
#   scripts/get_tools.sh                        what TOOLS names, by default all that the tests use
#   TOOLS="promtool" scripts/get_tools.sh       only these
#
# TOOLS lists Debian packages, each with the program it brings where that has another name:
# "package" or "package=program". A program that is on PATH is linked. On Debian every other one is
# downloaded with apt's own tools, signatures checked, from the mirror that the machine's sources name,
# and unpacked here; apt's lists and cache of the system stay as they are, and root is not needed.
# Whatever is there already is left alone.
#
# Chromium is the exception: it needs a hundred libraries where its package puts them. Where no Chromium or Chrome is on PATH,
# apt installs Debian's into the system, from the machine's own sources, reading their lists anew where they do not have it. That
# takes root, and does not come about on a machine that has a browser.
#
# Debian's Alertmanager reads its default templates from below /usr/share, where nothing is put: they are in
# .tools/usr/share, and the program that is fetched looks for them relative to where it is started, .tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TOOLS="${TOOLS:-prometheus promtool prometheus-alertmanager prometheus-alertmanager=amtool victoria-metrics victoria-metrics=vmalert docker-compose chromium}"
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

# Chromium goes by several names; a stub that only says how to install one does not count.
browser_on_path() {
    local name path
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if path="$(on_path "$name")" && "$path" --version >/dev/null 2>&1; then
            printf '%s\n' "$path"
            return 0
        fi
    done
    return 1
}

# Into the system, where it stays. As it has no desktop here, what Debian only recommends is left out.
install_chromium() {
    local state="$1" path get=(apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120)
    if ((EUID != 0)) || ! command -v apt-get >/dev/null || [[ ! -r "$KEYRING" ]]; then
        fail "there is no Chromium, which tests of the live page need. Install Chromium or Google Chrome so that it is on PATH
(on Debian 'apt-get install chromium', as root), then run 'make tools' again."
    fi
    echo "get_tools: installing Debian's chromium into the system"
    export DEBIAN_FRONTEND=noninteractive
    # Lists that are there may be so old that their mirror has those versions no more.
    if ! "${get[@]}" install --no-install-recommends chromium >"$state/chromium.log" 2>&1; then
        "${get[@]}" update || fail "apt-get could not read the package sources of this machine; is there a network?"
        "${get[@]}" install --no-install-recommends chromium >"$state/chromium.log" 2>&1 ||
            { tail -n 20 "$state/chromium.log" >&2 && fail "apt-get could not install chromium"; }
    fi
    path="$(browser_on_path)" || fail "Debian's chromium does not run on this system"
    ln -sfn "$path" "$BIN/chromium"
    echo "get_tools: chromium is installed, using $path"
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
Install Prometheus and Alertmanager (https://prometheus.io/download/, or your system's packages; Alertmanager's program
under the name 'prometheus-alertmanager'), VictoriaMetrics (https://github.com/VictoriaMetrics/VictoriaMetrics/releases, the
single node; its program under the name 'victoria-metrics') and Docker Compose so that these programs are on PATH, then run
'make tools' again."
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
    local state="$1" package="$2" program="$3" found
    local files="$state/$package/files"
    if [[ ! -d "$files" ]]; then # A package may bring several programs.
        mkdir -p "$files"
        (cd "$state/$package" && apt-get -q -c "$state/apt.conf" download "$package")
        dpkg -x "$state/$package"/*.deb "$files"
    fi
    found="$(find "$files" -path "*/usr/bin/$program" -o -path "*/usr/libexec/*/$program" | head -n 1)"
    [[ -n "$found" && -x "$found" ]] || fail "Debian's package $package has no program $program: write it as PACKAGE=PROGRAM in TOOLS"
    "$found" --version >/dev/null 2>&1 || fail "$program from Debian $SUITE does not run on this system"
    bring_templates "$files" "$found"
    mv -f "$found" "$BIN/$program"
}

# Copies the default templates of Alertmanager, and replaces their path in the program by a relative one of the same length.
bring_templates() {
    local files="$1" program="$2" templates=usr/share/prometheus/alertmanager
    if [[ -d "$files/$templates" ]]; then
        mkdir -p "$ROOT/$templates"
        cp -R "$files/$templates/." "$ROOT/$templates"
        LC_ALL=C sed -i "s#/$templates#${templates/\//\/\/}#g" "$program"
    fi
}

main() {
    local tool program missing=() path browser="" state
    mkdir -p "$BIN"
    for tool in $TOOLS; do
        program="${tool#*=}"
        if [[ -x "$BIN/$program" ]]; then
            continue
        elif [[ "$program" == chromium ]]; then
            if path="$(browser_on_path)"; then
                ln -sfn "$path" "$BIN/chromium"
                echo "get_tools: chromium is installed, using $path"
            else
                browser=chromium
            fi
        elif path="$(on_path "$program")"; then
            ln -sfn "$path" "$BIN/$program"
            echo "get_tools: $program is installed, using $path"
        else
            missing+=("$tool")
        fi
    done
    if ((${#missing[@]} > 0)) || [[ -n "$browser" ]]; then
        state="$(mktemp -d "$ROOT/apt.XXXXXX")"
        # shellcheck disable=SC2064  # The directory's name is wanted as it is now.
        trap "rm -rf '$state'" EXIT
    fi
    [[ -z "$browser" ]] || install_chromium "$state"
    if ((${#missing[@]} == 0)); then
        echo "get_tools: everything is there ($TOOLS)"
        return
    fi

    local mirror
    command -v apt-get >/dev/null && command -v dpkg >/dev/null && [[ -r "$KEYRING" ]] || explain "${missing[@]}"
    mirror="$(debian_mirror)" || explain "${missing[@]}"
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
