//! Who this program is to a registry: what `docker login` and `podman login` left, or two variables.

use super::error::{Error, Result};
use docker_credential::{CredentialRetrievalError, DockerCredential, get_credential, get_podman_credential};
use oci_client::secrets::RegistryAuth;

/// The variable with the name of the user.
pub(crate) const USER: &str = "FLASHTUNE_REGISTRY_USER";
/// The variable with the password or the access token.
pub(crate) const PASSWORD: &str = "FLASHTUNE_REGISTRY_PASSWORD";

/// The credentials for a registry: the variables', else podman's file (`REGISTRY_AUTH_FILE` or where podman keeps it),
/// else docker's (below `DOCKER_CONFIG` or `~/.docker`) with its helpers; nobody's where nothing is configured.
///
/// # Errors
/// [`Error::Credentials`] when something is configured and is of no use: an anonymous request would fail with a
/// reason that has nothing to do with it.
pub(crate) fn find(registry: &str) -> Result<RegistryAuth> {
    let bad = |place: &str, message: String| Error::Credentials {
        registry: registry.to_owned(),
        place: place.to_owned(),
        message,
    };
    let variable = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
    match (variable(USER), variable(PASSWORD)) {
        (Some(user), Some(password)) => return Ok(RegistryAuth::Basic(user, password)),
        (None, None) => {}
        _ => return Err(bad("the environment", format!("one of {USER} and {PASSWORD} is not set"))),
    }
    // Docker files its own registry under an address.
    let key =
        if matches!(registry, "docker.io" | "index.docker.io") { "https://index.docker.io/v1/" } else { registry };
    for (place, found) in
        [("podman's auth.json", get_podman_credential(key)), ("docker's config.json", get_credential(key))]
    {
        match found {
            Ok(DockerCredential::UsernamePassword(user, password)) => return Ok(RegistryAuth::Basic(user, password)),
            Ok(DockerCredential::IdentityToken(_)) => {
                let message = "an identity token, which is of no use to this program; log in with an access token";
                return Err(bad(place, message.to_owned()));
            }
            Err(
                CredentialRetrievalError::NoCredentialConfigured
                | CredentialRetrievalError::ConfigNotFound
                | CredentialRetrievalError::ConfigReadError,
            ) => {}
            // A helper that has nothing of this registry is not a failure of it.
            Err(CredentialRetrievalError::HelperFailure { stdout, .. }) if stdout.contains("credentials not found") => {
            }
            Err(e) => return Err(bad(place, e.to_string().trim().to_owned())),
        }
    }
    Ok(RegistryAuth::Anonymous)
}
