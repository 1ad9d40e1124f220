//! What can go wrong between this program and a registry.

/// Errors of `push` and `pull`. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A name that no registry has.
    #[error("`{text}`: {message}; write oci://HOST/NAME:TAG, or oci://HOST/NAME@sha256:DIGEST to pull")]
    Reference {
        /// As it was given.
        text: String,
        /// What is wrong with it.
        message: String,
    },
    /// The registry does not answer.
    #[error(
        "{registry}: {message}; check its name, the network and the proxy's variables (HTTPS_PROXY, NO_PROXY), or give \
         --plain-http for a registry without TLS"
    )]
    Unreachable {
        /// The registry's host.
        registry: String,
        /// What was attempted, and the system's answer.
        message: String,
    },
    /// The registry wants credentials, or others.
    #[error(
        "{registry} refuses access: {message}; log in (`docker login {registry}`, `podman login {registry}`), or set \
         FLASHTUNE_REGISTRY_USER and FLASHTUNE_REGISTRY_PASSWORD"
    )]
    Denied {
        /// The registry's host.
        registry: String,
        /// The registry's answer.
        message: String,
    },
    /// Credentials are configured and cannot be had.
    #[error(
        "the credentials for {registry} in {place}: {message}; log in again, or set FLASHTUNE_REGISTRY_USER and \
         FLASHTUNE_REGISTRY_PASSWORD"
    )]
    Credentials {
        /// The registry's host.
        registry: String,
        /// The file or the variables.
        place: String,
        /// What is wrong.
        message: String,
    },
    /// There is nothing of that name.
    #[error("{reference}: the registry has nothing of that name; look at its tags, or `flashtune push` it first")]
    NotFound {
        /// What was asked for.
        reference: String,
    },
    /// What came is not what was named: damaged on the way, or somebody changed it.
    #[error(
        "{reference}: {what} is {found}, but {expected} was expected; nothing was kept. Pull again, and if it stays so \
         push it anew and mistrust the registry"
    )]
    Tampered {
        /// What was asked for.
        reference: String,
        /// The part that differs.
        what: String,
        /// Its value.
        found: String,
        /// What it should have been.
        expected: String,
    },
    /// More than this program takes.
    #[error("{reference}: {what} has {found} bytes, and at most {limit} are taken; nothing was kept")]
    TooLarge {
        /// What was asked for.
        reference: String,
        /// The part.
        what: String,
        /// Its size, or `more` of what has no end.
        found: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// Something else lies under that name.
    #[error("{reference} holds no bundles: {message}; pull what `flashtune push` wrote")]
    Foreign {
        /// What was asked for.
        reference: String,
        /// What is there.
        message: String,
    },
    /// A bundle without a signature.
    #[error("{file} is not signed, so nobody who pulls it could use it; `flashtune sign` it, or give --allow-unsigned")]
    Unsigned {
        /// The bundle.
        file: String,
    },
    /// The registry fails, or answers what it should not.
    #[error("{registry}: {message}; try again, and look at the registry's log")]
    Registry {
        /// The registry's host.
        registry: String,
        /// Its answer.
        message: String,
    },
}

/// Result of this module.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
