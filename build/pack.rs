//! Compresses images of kernels to `.lzma` files.

use super::nvcc::Kind;
use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};
use std::io::{self, Read, Write};

/// Number of the compression's parameters. A change of them raises it, so that the cache is not used.
pub const FORMAT: u32 = 2;

/// Compresses an image for the cache, quickly.
pub fn keep(image: &[u8]) -> io::Result<Vec<u8>> {
    let mut options = LzmaOptions::with_preset(0);
    options.dict_size = 1 << 20;
    write(image, &options)
}

/// Unpacks an image from the cache.
pub fn kept(packed: &[u8]) -> io::Result<Vec<u8>> {
    let mut image = Vec::new();
    LzmaReader::new_mem_limit(packed, u32::MAX, None)?.read_to_end(&mut image)?;
    Ok(image)
}

/// Compresses images of one kind, one behind the other.
pub fn pack(images: &[u8], kind: Kind) -> io::Result<Vec<u8>> {
    let mut options = LzmaOptions::with_preset(9);
    if kind == Kind::Code {
        // Contexts by position in 16 bytes, the size of an instruction: 5 % smaller machine code.
        (options.lc, options.lp, options.pb) = (0, 4, 4);
    }
    // Longer matches would double the time and save a thousandth.
    options.nice_len = 128;
    options.dict_size = u32::try_from(images.len()).unwrap_or(u32::MAX).max(1 << 12);
    write(images, &options)
}

/// Compresses to a file whose header states the unpacked length.
fn write(bytes: &[u8], options: &LzmaOptions) -> io::Result<Vec<u8>> {
    let mut writer = LzmaWriter::new_use_header(Vec::new(), options, Some(bytes.len() as u64))?;
    writer.write_all(bytes)?;
    writer.finish()
}
