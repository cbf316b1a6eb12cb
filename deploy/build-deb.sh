#!/bin/bash
# Puts a Debian package together from what was built.
#
#   build-deb.sh BUILT OUTPUT    BUILT holds the programs, such as target/release; the package goes into OUTPUT
set -euo pipefail

fail() {
  echo "build-deb: $*" >&2
  exit 1
}

[ $# = 2 ] || fail "say where the programs are and where the package shall go"
for tool in dpkg-deb dpkg-shlibdeps; do
  command -v "$tool" >/dev/null || fail "$tool is not here: apt-get install dpkg-dev"
done
source=$(cd "$(dirname "$0")/.." && pwd)
built=$(cd "$1" && pwd)
mkdir -p "$2"
output=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

staged=$work/staged
make --no-print-directory -C "$source" install DESTDIR="$staged" BUILT="$built" >/dev/null
strip --strip-unneeded "$staged"/usr/bin/* "$staged"/usr/lib/wadi/*

# dpkg-shlibdeps looks for debian/control where it runs.
mkdir "$work/debian"
printf 'Source: wadi\n\nPackage: wadi\nArchitecture: any\n' >"$work/debian/control"
libraries=$(cd "$work" && dpkg-shlibdeps -O staged/usr/bin/* staged/usr/lib/wadi/* 2>"$work/said" | sed -n 's/^shlibs:Depends=//p') || true
[ -n "$libraries" ] || fail "dpkg-shlibdeps does not say which libraries the programs need: $(cat "$work/said")"

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' "$source/Cargo.toml")
[ -n "$version" ] || fail "Cargo.toml does not say which version this is"
architecture=$(dpkg --print-architecture)
installed=$(du -sk "$staged" | cut -f1)

mkdir "$staged/DEBIAN"
sed -e "s/@VERSION@/$version/; s/@ARCHITECTURE@/$architecture/; s/@INSTALLED_SIZE@/$installed/; s/@DEPENDS@/$libraries/" \
  "$source/deploy/debian/control.in" >"$staged/DEBIAN/control"
install -m 755 "$source"/deploy/debian/{postinst,prerm,postrm} "$staged/DEBIAN/"
(cd "$staged" && find etc -type f -printf '/%p\n' | sort) >"$staged/DEBIAN/conffiles"
(cd "$staged" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$staged/DEBIAN/md5sums"

package=$output/wadi_${version}_$architecture.deb
dpkg-deb --root-owner-group -Zxz -z1 --build "$staged" "$package" >/dev/null
echo "$package"
