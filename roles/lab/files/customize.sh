#!/bin/sh
# mmdebstrap calls this with the new root as its argument: make it a host, not yet any one host.
set -eu
root=$1
here=$(dirname "$0")

install -m 0755 "$here/lab-host" "$root/usr/local/sbin/lab-host"
install -m 0644 "$here/lab-boot.service" "$here/lab-sysctl.service" "$root/etc/systemd/system/"
chroot "$root" systemctl enable lab-boot.service lab-sysctl.service

chroot "$root" useradd --create-home --shell /bin/bash ops
printf 'ops ALL=(ALL) NOPASSWD: ALL\n' >"$root/etc/sudoers.d/ops"
chmod 0440 "$root/etc/sudoers.d/ops"

# Made anew by every host at its first start: keys and ids baked in would be shared by all.
rm -f "$root"/etc/ssh/ssh_host_*
: >"$root/etc/machine-id"

# What a container cannot or need not do.
chroot "$root" systemctl mask getty.target console-getty.service systemd-udevd.service \
    systemd-networkd-wait-online.service systemd-logind-varlink.socket

# A machine behind its own certificate authority hands it on, so that https mirrors answer.
if [ -f /etc/ssl/certs/ca-certificates.crt ]; then
    install -m 0644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
fi
