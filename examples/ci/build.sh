#!/usr/bin/env bash
# Builds a manifest, verifies it, signs it and pushes one of its models: what any CI runs, or a person without one.
#
#   MANIFEST=manifests/quickstart.yaml MODEL=quickstart TAG=v1 TARGET=cpu:x86-64-v3 \
#   KEY=env://SIGNING_KEY PUSH=oci://registry.example.com/team/quickstart:v1 bash examples/ci/build.sh
#
# STORE is kept from run to run, by the CI's cache: what it holds is not compiled again. Without KEY nothing is signed,
# and without PUSH nothing is pushed. It needs aotc[build,oci,sign] and g++; the key's password is $COSIGN_PASSWORD.
set -euo pipefail
: "${MANIFEST:?the file of the manifest}" "${MODEL:?the model to push}" "${TAG:?the tag of the release}"
STORE=${STORE:-aotc-store}
target=() sign=()
[ -z "${TARGET:-}" ] || target=(--target "$TARGET")
[ -z "${KEY:-}" ] || sign=(--sign "$KEY")
aotc build "$MANIFEST" "${target[@]}" --tag "$TAG" --store "$STORE" --attest "${sign[@]}"
aotc verify "$STORE#$MODEL:$TAG" --seeds "${SEEDS:-1}" --attest "${sign[@]}"
[ -z "${KEY:-}" ] || aotc sign "$STORE#$MODEL:$TAG" --key "$KEY" --expires "${EXPIRES:-30d}"
[ -z "${PUSH:-}" ] || aotc push "$STORE#$MODEL:$TAG" "$PUSH"
aotc inspect "$STORE#$MODEL:$TAG" --json > aotc-release.json
aotc gc --store "$STORE" --older-than 30d
