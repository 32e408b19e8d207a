#!/usr/bin/env bash
# Puts what the Grafana dashboards are checked with into .tools/grafana_schema: Grafana's published types, the TypeScript
# compiler, and Grafana's list of units. Versions and hashes stand in tests/dashboards/grafana_schema; npm runs no script of theirs.
# What depends on the version stands there too, and a test compares it: units.txt, and defaults.json, which defaults.mjs prints.
#
# Without npm there is nothing to do and the tests that need it are skipped; where CI is "true" that is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FROM=tests/dashboards/grafana_schema
TO=.tools/grafana_schema
UNITS=package/dist/esm/valueFormats/categories.mjs

if cmp -s "$FROM/package-lock.json" "$TO/installed"; then
    echo "get_schema: everything is there"
    exit 0
fi
if ! command -v npm >/dev/null || ! command -v node >/dev/null; then
    echo "get_schema: npm or node is not on PATH: the dashboards cannot be checked against Grafana's types" >&2
    if [[ "${CI:-}" == true ]]; then exit 1; else exit 0; fi
fi

rm -rf "$TO"
mkdir -p "$TO"
cp "$FROM/package.json" "$FROM/package-lock.json" "$TO/"
cd "$TO"
npm ci --ignore-scripts --no-audit --no-fund

# Of this package one file is wanted, without the hundred packages that it would bring along.
version="$(node -p 'require("./node_modules/@grafana/schema/package.json").version')"
npm pack --silent "@grafana/data@$version" >/dev/null
tar -xzf grafana-data-*.tgz "$UNITS"
mv "$UNITS" units.mjs
rm -rf package grafana-data-*.tgz

cp package-lock.json installed
echo "get_schema: Grafana's types $version are in $TO"
