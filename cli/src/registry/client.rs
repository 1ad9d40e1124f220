//! Speaking with a registry: what comes is bounded, and kept in memory until it is verified.

use super::artifact::{self, Artifact, MOST, MOST_OF_MANIFEST};
use super::error::{Error, Result};
use super::name::Name;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::{DigestError, OciDistributionError, OciErrorCode};
use oci_client::manifest::{OCI_IMAGE_MEDIA_TYPE, OciDescriptor};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, RegistryOperation};
use reqwest::StatusCode;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::AsyncWrite;

/// Most time to connect, and between two pieces of an answer.
const CONNECT: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_secs(30);
/// Most time for what is small: credentials and a manifest.
const SMALL: Duration = Duration::from_secs(60);

/// A registry that is spoken with.
pub(crate) struct Registry {
    name: Name,
    auth: RegistryAuth,
    client: Client,
    /// For manifests, of which the other client takes as much as is sent.
    http: reqwest::Client,
    runtime: tokio::runtime::Runtime,
}

impl Registry {
    /// Prepares to speak with the registry of a name.
    pub(crate) fn new(name: Name, auth: RegistryAuth) -> Result<Self> {
        // A second installation says so and changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let failed = |message: String| Error::Registry { registry: name.registry().to_owned(), message };
        let config = ClientConfig {
            protocol: if name.plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT),
            read_timeout: Some(SILENCE),
            user_agent: USER_AGENT,
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).map_err(|e| failed(e.to_string()))?;
        let http = reqwest::Client::builder().connect_timeout(CONNECT).read_timeout(SILENCE).user_agent(USER_AGENT);
        let http = http.build().map_err(|e| failed(e.to_string()))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| failed(e.to_string()))?;
        Ok(Self { name, auth, client, http, runtime })
    }

    /// Uploads an artifact: layers, configuration, and the manifest last, so that the name never means half of it.
    /// Gives the digest.
    pub(crate) fn push(&self, artifact: Artifact) -> Result<String> {
        let Artifact { layers, config, manifest } = artifact;
        let reference = &self.name.reference;
        self.runtime.block_on(async {
            self.sign_in(RegistryOperation::Push).await?;
            for blob in layers.into_iter().chain([config]) {
                let digest = artifact::digest(&blob);
                if !self.client.blob_exists(reference, &digest).await.map_err(|e| self.failed(e))? {
                    self.client.push_blob(reference, blob, &digest).await.map_err(|e| self.failed(e))?;
                }
            }
            let digest = artifact::digest(&manifest);
            let kind = OCI_IMAGE_MEDIA_TYPE.parse().expect("a media type is a header");
            self.client.push_manifest_raw(reference, manifest, kind).await.map_err(|e| self.failed(e))?;
            Ok(digest)
        })
    }

    /// The manifest under the name, and its digest. It is what the name's digest says, where it has one.
    pub(crate) fn manifest(&self) -> Result<(Vec<u8>, String)> {
        let bytes = self.runtime.block_on(self.soon(async {
            let token = self.sign_in(RegistryOperation::Pull).await?;
            self.read_manifest(token).await
        }))?;
        let digest = artifact::digest(&bytes);
        match self.name.reference.digest() {
            Some(expected) if expected != digest => Err(self.tampered("the digest of the manifest", &digest, expected)),
            _ => Ok((bytes, digest)),
        }
    }

    /// A layer's bytes, of the digest and the length that the manifest says.
    pub(crate) fn layer(&self, layer: &OciDescriptor) -> Result<Vec<u8>> {
        let expected = u64::try_from(layer.size).unwrap_or(0);
        let mut out = Bounded { bytes: Vec::new(), limit: expected, over: false };
        let pulled = self.runtime.block_on(async {
            // By its digest alone: a manifest may name other addresses, which nobody has to visit.
            self.client.pull_blob(&self.name.reference, layer.digest.as_str(), &mut out).await
        });
        let what = format!("the length of layer {}", layer.digest);
        match pulled {
            _ if out.over => Err(self.tampered(&what, "more", &expected.to_string())),
            Err(e) => Err(self.failed(e)),
            Ok(()) if out.bytes.len() as u64 != expected => {
                Err(self.tampered(&what, &out.bytes.len().to_string(), &expected.to_string()))
            }
            Ok(()) => Ok(out.bytes),
        }
    }

    /// Has the registry's token, where it gives tokens.
    async fn sign_in(&self, operation: RegistryOperation) -> Result<Option<String>> {
        self.client.auth(&self.name.reference, &self.auth, operation).await.map_err(|e| self.failed(e))
    }

    async fn read_manifest(&self, token: Option<String>) -> Result<Vec<u8>> {
        let reference = &self.name.reference;
        let which = reference.digest().or(reference.tag()).unwrap_or("latest");
        let scheme = if self.name.plain { "http" } else { "https" };
        let url = format!("{scheme}://{}/v2/{}/manifests/{which}", self.name.registry(), reference.repository());
        let request = || self.http.get(&url).header("Accept", OCI_IMAGE_MEDIA_TYPE);
        let first = match &token {
            Some(token) => request().bearer_auth(token),
            None => request(),
        };
        let mut answer = first.send().await.map_err(|e| self.failed(e.into()))?;
        if let (StatusCode::UNAUTHORIZED, None, RegistryAuth::Basic(user, password)) =
            (answer.status(), token, &self.auth)
        {
            answer = request().basic_auth(user, Some(password)).send().await.map_err(|e| self.failed(e.into()))?;
        }
        if !answer.status().is_success() {
            return Err(self.refused(answer.status().as_u16(), &format!("GET {}", answer.url())));
        }
        let mut bytes = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(|e| self.failed(e.into()))? {
            bytes.extend_from_slice(&piece);
            if bytes.len() as u64 > MOST_OF_MANIFEST {
                let (what, found) = ("its manifest".to_owned(), "more".to_owned());
                let reference = self.name.text.clone();
                return Err(Error::TooLarge { reference, what, found, limit: MOST_OF_MANIFEST });
            }
        }
        Ok(bytes)
    }

    /// What is small does not take long.
    async fn soon<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let late = |_| self.registry_error(format!("no whole answer within {} s", SMALL.as_secs()));
        tokio::time::timeout(SMALL, work).await.map_err(late)?
    }

    fn registry_error(&self, message: String) -> Error {
        Error::Registry { registry: self.name.registry().to_owned(), message }
    }

    fn tampered(&self, what: &str, found: &str, expected: &str) -> Error {
        Error::Tampered {
            reference: self.name.text.clone(),
            what: what.to_owned(),
            found: found.to_owned(),
            expected: expected.to_owned(),
        }
    }

    /// An answer that is no success.
    fn refused(&self, code: u16, message: &str) -> Error {
        let registry = self.name.registry().to_owned();
        match code {
            401 | 403 => Error::Denied { registry, message: format!("{message}: status {code}") },
            404 => Error::NotFound { reference: self.name.text.clone() },
            _ => self.registry_error(format!("{message}: status {code}")),
        }
    }

    fn failed(&self, e: OciDistributionError) -> Error {
        use OciDistributionError as E;
        let registry = self.name.registry().to_owned();
        match e {
            E::AuthenticationFailure(message) => Error::Denied { registry, message: brief(&message) },
            E::UnauthorizedError { url } => self.refused(401, &url),
            E::ServerError { code, url, .. } => self.refused(code, &url),
            E::ImageManifestNotFoundError(_) => Error::NotFound { reference: self.name.text.clone() },
            E::DigestError(DigestError::VerificationError { expected, actual }) => {
                self.tampered("the digest of a layer", &actual, &expected)
            }
            E::RegistryError { envelope, url } => {
                let code = envelope.errors.first().map(|e| &e.code);
                match code {
                    Some(OciErrorCode::Unauthorized | OciErrorCode::Denied) => self.refused(401, &url),
                    Some(
                        OciErrorCode::ManifestUnknown
                        | OciErrorCode::NameUnknown
                        | OciErrorCode::BlobUnknown
                        | OciErrorCode::NotFound,
                    ) => Error::NotFound { reference: self.name.text.clone() },
                    _ => self.registry_error(brief(&format!("{url}: {envelope}"))),
                }
            }
            E::RequestError(e) if e.status().is_some() => {
                let code = e.status().map_or(0, |s| s.as_u16());
                self.refused(code, e.url().map_or("", |url| url.as_str()))
            }
            E::RequestError(e) if e.is_connect() || e.is_timeout() => {
                Error::Unreachable { registry, message: chain(&e) }
            }
            E::RequestError(e) => self.registry_error(chain(&e)),
            e => self.registry_error(chain(&e)),
        }
    }
}

const USER_AGENT: &str = concat!("flashtune/", env!("CARGO_PKG_VERSION"));

/// An error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        let more = e.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = e.source();
    }
    brief(&text)
}

/// A server's words, on one line and not too many.
fn brief(text: &str) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(400).collect();
    line.trim().to_owned()
}

/// Takes as many bytes as were announced.
struct Bounded {
    bytes: Vec<u8>,
    limit: u64,
    over: bool,
}

impl AsyncWrite for Bounded {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, piece: &[u8]) -> Poll<io::Result<usize>> {
        if self.bytes.len() as u64 + piece.len() as u64 > self.limit.min(MOST + MOST_OF_MANIFEST) {
            self.over = true;
            return Poll::Ready(Err(io::Error::other("more than was announced")));
        }
        self.bytes.extend_from_slice(piece);
        Poll::Ready(Ok(piece.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
