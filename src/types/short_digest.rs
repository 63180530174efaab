//! Short hashes of texts, by which ranks and saved files recognise what they describe.

use sha2::{Digest, Sha256};

/// Returns the first 16 hexadecimal digits of the SHA-256 of a text.
pub fn short_digest(text: impl AsRef<[u8]>) -> String {
    let digest = Sha256::digest(text.as_ref());
    digest[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_the_beginning_of_a_sha_256() {
        // The first example of FIPS 180-2, appendix B.
        assert_eq!(short_digest("abc"), "ba7816bf8f01cfea");
    }
}
