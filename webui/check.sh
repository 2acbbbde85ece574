#!/bin/sh
# Is the committed page what its sources make? Types are checked, and the build is compared byte for byte. Where npm or
# the network is missing this says so and passes: running the page needs neither.
set -eu
cd "$(dirname "$0")"
if ! command -v npm >/dev/null; then
  echo "the page's build is not checked: no npm here"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! npm ci --no-audit --no-fund >"$work/npm.log" 2>&1; then
  if grep -qE 'ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|ERR_SOCKET_TIMEOUT' "$work/npm.log"; then
    echo "the page's build is not checked: no network for npm"
    exit 0
  fi
  cat "$work/npm.log"
  exit 1
fi
npx --no-install tsc --noEmit
mkdir "$work/built"
node build.mjs "$work/built"
for made in "$work"/built/*; do
  if ! cmp "$made" "$(basename "$made")"; then
    echo "the page is not what its sources make: run \`make page\`"
    exit 1
  fi
done
echo "the page is what its sources make"
