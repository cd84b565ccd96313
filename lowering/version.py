"""The version of this project, which is in manifests and wheels too."""

VERSION = "0.1.0"
