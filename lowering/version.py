"""The version of this project, also in manifests and wheels."""

VERSION = "0.1.0"
