//! Builds the test guest from Debian packages.
