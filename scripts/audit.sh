#!/bin/sh
# Compare the versions of constraints.txt with the published advisories: sh scripts/audit.sh PIP-AUDIT.
# Ends with 1 for a version with an advisory, and with 3 if the server of the advisories cannot be asked.
audit=$1
log=$(mktemp) || exit 3
trap 'rm -f "$log"' EXIT
"$audit" --strict --requirement constraints.txt --no-deps --disable-pip >"$log" 2>&1
status=$?
cat "$log"
if [ "$status" -ne 0 ] && grep -Eqi \
  'ConnectionError|ConnectTimeout|ProxyError|SSLError|Max retries|Temporary failure|Name or service|ServiceError|HTTPError|could not be audited' "$log"
then
  cat >&2 <<'TEXT'
error: the server of the advisories did not answer, so nothing is known of new ones
  asked: the package index, whose JSON interface names the advisories of a version; a mirror may lack it
  next:  run `make audit` on a machine that reaches it; meanwhile tests/test_dependencies.py holds the
         installed versions to the minima of pyproject.toml, which leave out the advisories named there
TEXT
  exit 3
fi
exit "$status"
