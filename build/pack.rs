//! Compresses images of kernels to `.lzma` files, whose header states the unpacked length.

use super::nvcc::Kind;
use lzma_rust2::{LzmaOptions, LzmaWriter};
use std::io::{self, Write};

/// Number of the compression's parameters. A change of them raises it, so that the cache is not used.
pub const FORMAT: u32 = 1;

/// Offset of the unpacked length in a `.lzma` file, behind a byte of parameters and the size of the
/// dictionary.
const LENGTH_AT: usize = 5;

/// Compresses an image.
pub fn pack(image: &[u8], kind: Kind) -> io::Result<Vec<u8>> {
    let mut options = LzmaOptions::with_preset(9);
    if kind == Kind::Code {
        // Contexts by position in 16 bytes, the size of an instruction: 5 % smaller machine code.
        (options.lc, options.lp, options.pb) = (0, 4, 4);
    }
    // Longer matches would double the time and save a thousandth.
    options.nice_len = 128;
    options.dict_size = u32::try_from(image.len()).unwrap_or(u32::MAX).max(1 << 12);
    let mut writer = LzmaWriter::new_use_header(Vec::new(), &options, Some(image.len() as u64))?;
    writer.write_all(image)?;
    writer.finish()
}

/// Returns the unpacked length in bytes of an image that [`pack`] compressed.
pub fn unpacked_len(packed: &[u8]) -> Result<u64, String> {
    match packed.get(LENGTH_AT..).and_then(<[u8]>::first_chunk) {
        Some(bytes) => Ok(u64::from_le_bytes(*bytes)),
        None => Err("a compressed image has no header".into()),
    }
}
