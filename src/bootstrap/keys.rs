//! Keys, seals and random bytes, by HKDF and HMAC with SHA-256.

use crate::error::{Error, ErrorKind, Result};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// A key or a full digest.
pub(super) type DerivedKey = [u8; 32];

/// A message authentication code under a key.
pub(super) type Authenticator = Hmac<Sha256>;

/// Derives a key for `purpose` by HKDF-SHA256. Keys of two purposes reveal nothing about each other.
pub(super) fn derive(secret: &[u8], salt: &[u8], purpose: &str) -> DerivedKey {
    let mut key = [0; 32];
    Hkdf::<Sha256>::new(Some(salt), secret)
        .expand(purpose.as_bytes(), &mut key)
        .expect("32 bytes are within what HKDF-SHA256 can give");
    #[cfg(test)]
    recording::record([secret, &key]);
    key
}

/// A record of all secrets from which this process derives keys, and of these keys, for tests.
#[cfg(test)]
pub(crate) mod recording {
    use std::sync::{Mutex, PoisonError};

    /// `None` while no test records.
    static SECRETS: Mutex<Option<Vec<Vec<u8>>>> = Mutex::new(None);

    /// Starts a record.
    pub(crate) fn start() {
        *SECRETS.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Ends the record and returns it.
    pub(crate) fn stop() -> Vec<Vec<u8>> {
        let mut secrets = SECRETS.lock().unwrap_or_else(PoisonError::into_inner);
        secrets.take().unwrap_or_default()
    }

    pub(super) fn record(secrets: [&[u8]; 2]) {
        let mut record = SECRETS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = &mut *record {
            record.extend(secrets.iter().map(|secret| secret.to_vec()));
        }
    }
}

/// Returns an authenticator under `key`. Clone it for each message: the key schedule runs once.
pub(super) fn authenticator(key: &DerivedKey) -> Authenticator {
    Authenticator::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// Returns HMAC-SHA256 over the concatenation of `parts`.
pub(super) fn seal(authenticator: &Authenticator, parts: &[&[u8]]) -> DerivedKey {
    let mut mac = authenticator.clone();
    parts.iter().for_each(|part| Mac::update(&mut mac, part));
    mac.finalize().into_bytes().into()
}

/// Returns whether `seal`, which may be truncated, is the HMAC of `parts`. Takes constant time.
pub(super) fn opens(authenticator: &Authenticator, parts: &[&[u8]], seal: &[u8]) -> bool {
    let mut mac = authenticator.clone();
    parts.iter().for_each(|part| Mac::update(&mut mac, part));
    mac.verify_truncated_left(seal).is_ok()
}

/// Returns SHA-256 over the concatenation of `parts`.
pub(super) fn digest(parts: &[&[u8]]) -> DerivedKey {
    let mut hash = Sha256::new();
    parts
        .iter()
        .for_each(|part| Digest::update(&mut hash, part));
    hash.finalize().into()
}

/// Returns bytes of the operating system's generator.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|cause| {
        Error::new(
            ErrorKind::System,
            format!("the system has no random bytes: {cause}"),
        )
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    }

    #[test]
    fn derive_is_hkdf_of_rfc_5869() {
        // The test vector of appendix A.3 has an empty `info`. The `info` of A.1 is not text, which
        // `derive` requires.
        let expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d";
        assert_eq!(derive(&[0x0b; 22], &[], "").to_vec(), hex(expected));
    }

    #[test]
    fn seal_is_hmac_of_rfc_4231() {
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe"); // zero padding is part of HMAC's key schedule
        let mac = authenticator(&key);
        let expected = hex("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let parts: [&[u8]; 2] = [b"what do ya want ", b"for nothing?"];
        assert_eq!(seal(&mac, &parts).to_vec(), expected);
        assert!(opens(&mac, &parts, &expected[..16]));
        assert!(!opens(&mac, &parts, &[]));
        assert!(!opens(&mac, &parts[..1], &expected));
    }
}
