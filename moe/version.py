"""The version, in a file that the build reads without importing anything."""

VERSION = "0.2.0"
