"""The OCI image layout on disk: blobs, index, tags, bundles and units, as `FORMAT.md` specifies them."""
