//! `oci://HOST/NAME:TAG`: where an artifact lies.

use super::error::{Error, Result};
use oci_client::Reference;

/// Where an artifact lies, and how to speak with the registry.
#[derive(Debug, Clone)]
pub(crate) struct Name {
    /// As the crate takes it.
    pub reference: Reference,
    /// As it was given, for messages.
    pub text: String,
    /// Whether the registry is spoken to without TLS.
    pub plain: bool,
}

impl Name {
    /// Reads one. Registries on this machine are spoken to without TLS, others where `plain` says so.
    pub(crate) fn parse(text: &str, plain: bool) -> Result<Self> {
        let bad = |message: &str| Error::Reference { text: text.to_owned(), message: message.to_owned() };
        let rest = text.strip_prefix("oci://").ok_or_else(|| bad("it does not begin with oci://"))?;
        // Without a dot or a port the first part would be taken for a folder of Docker's own registry.
        let host = rest.split_once('/').map(|(host, _)| host).filter(|h| h.contains(['.', ':']) || *h == "localhost");
        let host = host.ok_or_else(|| bad("it names no registry"))?;
        let reference: Reference = rest.parse().map_err(|e| bad(&format!("{e}")))?;
        Ok(Self { reference, text: text.to_owned(), plain: plain || is_local(host) })
    }

    /// The same, for what is to be pushed: a tag is what gets a new meaning, a digest cannot have one.
    pub(crate) fn parse_target(text: &str, plain: bool) -> Result<Self> {
        let name = Self::parse(text, plain)?;
        match name.reference.digest() {
            None => Ok(name),
            Some(_) => Err(Error::Reference {
                text: text.to_owned(),
                message: "a digest follows from what is pushed".to_owned(),
            }),
        }
    }

    /// The host that is spoken to.
    pub(crate) fn registry(&self) -> &str {
        self.reference.resolve_registry()
    }

    /// The same artifact for good, by its digest.
    pub(crate) fn pinned(&self, digest: &str) -> String {
        format!("oci://{}/{}@{digest}", self.reference.registry(), self.reference.repository())
    }
}

/// Whether a registry is on this machine.
fn is_local(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost" || name.parse::<std::net::Ipv4Addr>().is_ok_and(|a| a.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_registry_and_tls_unless_they_are_local() {
        let name = |text| Name::parse(text, false).unwrap();
        let n = name("oci://example.com/team/llama:h200");
        assert_eq!((n.registry(), n.reference.repository(), n.plain), ("example.com", "team/llama", false));
        assert_eq!(n.reference.tag(), Some("h200"));
        assert!(name("oci://localhost:5000/a:b").plain && name("oci://127.0.0.1:5000/a").plain);
        assert!(!name("oci://127.0.0.1.example.com/a").plain && !name("oci://localhost.example.com/a").plain);
        assert!(Name::parse("oci://example.com/a", true).unwrap().plain);
        let digest = format!("sha256:{}", "0a".repeat(32));
        let n = name(&format!("oci://example.com/a@{digest}"));
        assert_eq!((n.reference.digest(), n.reference.tag()), (Some(&*digest), None));
        assert_eq!(n.pinned(&digest), n.text);
        assert!(Name::parse_target(&n.text, false).unwrap_err().to_string().contains("follows from"));
        for bad in
            ["example.com/a:b", "oci://a:b", "oci://team/llama:b", "oci://example.com/A:b", "oci://example.com/a@b"]
        {
            let e = Name::parse(bad, false).unwrap_err().to_string();
            assert!(e.contains(bad) && e.contains("oci://HOST/NAME:TAG"), "{e}");
        }
    }
}
