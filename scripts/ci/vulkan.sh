#!/usr/bin/env bash
# A software Vulkan driver for ManiSkill3 (sapien) on a Debian box without a GPU. sapien needs Vulkan even for tasks that
# draw nothing, and bookworm's own Mesa 22.3 is too old for it (no descriptor indexing): Mesa 25 comes from backports.
# Does nothing where a Vulkan driver is installed already. Needs root, apt-get and a Debian mirror.
set -euo pipefail

if compgen -G "/usr/share/vulkan/icd.d/*.json" > /dev/null || compgen -G "/etc/vulkan/icd.d/*.json" > /dev/null; then
    exit 0
fi
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    echo "no Vulkan driver, and without root and apt-get none can be installed here; as root, on Debian or Ubuntu: $0" >&2
    exit 1
fi
. /etc/os-release
suite=()
if [ "${VERSION_CODENAME:-}" = bookworm ]; then
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm-backports main" \
        > /etc/apt/sources.list.d/bookworm-backports.list
    suite=(-t bookworm-backports)
fi
echo "installing a software Vulkan driver (Mesa) ..."
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${suite[@]}" mesa-vulkan-drivers libvulkan1 > /dev/null
