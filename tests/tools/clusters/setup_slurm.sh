#!/bin/sh
# Installs Slurm and munge from Debian, if they are absent: for tests/tools/clusters/test_slurm_cluster.py, which starts a
# cluster of its own on this machine. Nothing is started or configured here.
set -eu

for program in slurmctld slurmd sbatch munged; do
    command -v "$program" >/dev/null || missing=1
done
[ -z "${missing:-}" ] && exit 0
[ "$(id -u)" = 0 ] || { echo "install slurm-wlm and munge (Debian), or run this as root" >&2; exit 2; }
apt-get update -qq
# Their own services, with the machine's configuration, are not wanted.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
fi
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
