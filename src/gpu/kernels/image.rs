//! Images of kernels: machine code or PTX for one target, compressed in packs, and the choice for a GPU.

use crate::error::{Error, Result};
use lzma_rust2::LzmaReader;
use std::fmt;
use std::io::{self, Read};

/// Form of the code in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageKind {
    /// PTX, which the driver compiles for the GPU.
    Ptx,
    /// Machine code: a cubin.
    Code,
}

/// GPUs besides the image's own for which its instructions exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageScope {
    /// Newer GPUs: of the same major version for machine code, all for PTX.
    Newer,
    /// Newer GPUs of the same major version (`sm_100f`).
    Family,
    /// No other GPU (`sm_90a`).
    Exact,
}

/// GPUs for which an image was compiled, and its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageTarget {
    /// Machine code or PTX.
    pub kind: ImageKind,
    /// Compute capability, as major and minor version.
    pub capability: (u32, u32),
    /// Which other GPUs can run the image.
    pub scope: ImageScope,
}

impl ImageTarget {
    /// Returns whether a GPU of this compute capability can run the image.
    pub fn runs_on(self, capability: (u32, u32)) -> bool {
        let is_family = self.capability.0 == capability.0;
        let is_newer = self.capability <= capability;
        match (self.scope, self.kind) {
            (ImageScope::Exact, _) => self.capability == capability,
            (ImageScope::Newer, ImageKind::Ptx) => is_newer,
            (ImageScope::Newer, ImageKind::Code) | (ImageScope::Family, _) => is_family && is_newer,
        }
    }
}

impl fmt::Display for ImageTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ImageKind::Ptx => "compute",
            ImageKind::Code => "sm",
        };
        let scope = match self.scope {
            ImageScope::Newer => "",
            ImageScope::Family => "f",
            ImageScope::Exact => "a",
        };
        let (major, minor) = self.capability;
        write!(f, "{kind}_{major}{minor}{scope}")
    }
}

/// The images of several files for one target, compressed one behind the other, as the library contains them: similar
/// kernels compress to four fifths of what they take alone.
#[derive(Clone, Copy)]
pub struct KernelPack {
    /// Length of all images in bytes.
    pub len: usize,
    /// The images in the format `.lzma`.
    pub packed: &'static [u8],
}

/// Code of one file of `kernels/entry/` for one target.
#[derive(Clone, Copy)]
pub struct KernelImage {
    /// GPUs for which the image was compiled, and its form.
    pub target: ImageTarget,
    /// Place of the code in its unpacked pack.
    pub at: usize,
    /// Length of the code in bytes.
    pub len: usize,
    /// The pack.
    pub pack: KernelPack,
}

impl KernelImage {
    /// Unpacks the code, and all that lies before it in its pack.
    ///
    /// # Errors
    /// Internal if the pack is damaged, or has no such image.
    pub fn unpack(&self) -> Result<UnpackedImage> {
        PackReader::new(self)?.unpack(self)
    }
}

impl fmt::Debug for KernelImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelPack { len, packed } = self.pack;
        write!(
            f,
            "{} ({} bytes at {}, of {len} that are packed to {})",
            self.target,
            self.len,
            self.at,
            packed.len()
        )
    }
}

/// Unpacks images of one pack, in the order of their places.
pub struct PackReader {
    reader: LzmaReader<&'static [u8]>,
    at: usize,
}

impl PackReader {
    /// Begins with the pack of `image`.
    ///
    /// # Errors
    /// Internal if the pack is damaged.
    pub fn new(image: &KernelImage) -> Result<PackReader> {
        let KernelPack { len, packed } = image.pack;
        // The dictionary is as long as the images. Tables take less than 64 KiB.
        let limit = u32::try_from(len / 1024).unwrap_or(u32::MAX);
        let reader = LzmaReader::new_mem_limit(packed, limit.saturating_add(64), None);
        let reader = reader.map_err(|error| damaged(image, &error))?;
        Ok(PackReader { reader, at: 0 })
    }

    /// Unpacks an image of the pack, which lies behind those before.
    ///
    /// # Errors
    /// Internal if the pack has no such image, or the image lies before the last one.
    pub fn unpack(&mut self, image: &KernelImage) -> Result<UnpackedImage> {
        // Behind the code at least one byte stays 0.
        let mut memory = vec![0; image.len + IMAGE_ALIGN];
        let start = memory.as_ptr().align_offset(IMAGE_ALIGN);
        let code = memory
            .get_mut(start..)
            .and_then(|rest| rest.get_mut(..image.len));
        let read = match code {
            Some(code) => self.read(image, code),
            None => Err(io::Error::other("its memory cannot be aligned")),
        };
        read.map_err(|error| damaged(image, &error))?;
        // PTX ends with a null byte, from which the driver gets its length.
        let ending = usize::from(image.target.kind == ImageKind::Ptx);
        Ok(UnpackedImage {
            code: start..start + image.len + ending,
            memory,
        })
    }

    /// Unpacks the code of an image into memory of its length. The last image ends with the pack.
    fn read(&mut self, image: &KernelImage, code: &mut [u8]) -> io::Result<()> {
        let passed = image.at.checked_sub(self.at);
        let passed = passed.ok_or_else(|| io::Error::other("an image is behind another one"))?;
        let read = io::copy(&mut (&mut self.reader).take(passed as u64), &mut io::sink())?;
        if read != passed as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.reader.read_exact(code)?;
        self.at = image.at + image.len;
        let len = image.pack.len;
        if self.at == len && self.reader.read(&mut [0])? > 0 {
            return Err(io::Error::other(format!("more than {len} bytes")));
        }
        Ok(())
    }
}

fn damaged(image: &KernelImage, error: &io::Error) -> Error {
    let target = image.target;
    Error::internal(format!("the kernels for {target} are damaged: {error}"))
}

/// Alignment of unpacked code in memory: the driver reads 64-bit fields of a cubin.
const IMAGE_ALIGN: usize = 64;

/// Code that the driver can load.
pub struct UnpackedImage {
    memory: Vec<u8>,
    code: std::ops::Range<usize>,
}

impl UnpackedImage {
    /// Returns a cubin, or PTX with a null byte at its end.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.code.clone()]
    }
}

/// Returns the image that a GPU of this compute capability runs: machine code of the nearest GPU, otherwise
/// the newest PTX; `None` if it can run none of `images`.
pub fn choose(images: &[KernelImage], capability: (u32, u32)) -> Option<&KernelImage> {
    let able = images
        .iter()
        .filter(|image| image.target.runs_on(capability));
    able.max_by_key(|image| {
        (
            image.target.kind,
            image.target.capability,
            image.target.scope,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// Returns the target with the compiler's name `name`.
    fn target(name: &str) -> ImageTarget {
        let (kind, arch) = match name.split_once('_').unwrap() {
            ("sm", arch) => (ImageKind::Code, arch),
            (_, arch) => (ImageKind::Ptx, arch),
        };
        let digits = arch.trim_end_matches(['a', 'f']);
        let number: u32 = digits.parse().unwrap();
        let target = ImageTarget {
            kind,
            capability: (number / 10, number % 10),
            scope: match &arch[digits.len()..] {
                "a" => ImageScope::Exact,
                "f" => ImageScope::Family,
                _ => ImageScope::Newer,
            },
        };
        assert_eq!(target.to_string(), name);
        target
    }

    /// Returns the name of the image that a GPU with the compute capability `gpu`, without its point, gets from
    /// a build with `targets`.
    fn chosen(targets: &str, gpu: u32) -> Option<String> {
        let images = targets.split(' ').map(|name| KernelImage {
            target: target(name),
            at: 0,
            len: 0,
            pack: KernelPack {
                len: 0,
                packed: &[],
            },
        });
        let images: Vec<KernelImage> = images.collect();
        choose(&images, (gpu / 10, gpu % 10)).map(|image| image.target.to_string())
    }

    #[test]
    fn machine_code_of_nearest_gpu_then_newest_ptx_is_chosen() {
        let release = "sm_80 compute_80 sm_90 sm_100";
        for (targets, gpu, wanted) in [
            (release, 75, None),
            (release, 80, Some("sm_80")),
            (release, 86, Some("sm_80")),
            (release, 89, Some("sm_80")),
            (release, 90, Some("sm_90")),
            (release, 100, Some("sm_100")),
            (release, 103, Some("sm_100")),
            (release, 120, Some("compute_80")),
            ("sm_80 sm_86 sm_89", 86, Some("sm_86")),
            ("sm_89 sm_86 sm_80", 87, Some("sm_86")),
            ("sm_86 sm_90", 80, None),
            ("sm_90", 100, None),
            // Machine code is preferred to newer PTX.
            ("sm_80 compute_86", 89, Some("sm_80")),
            ("compute_80", 80, Some("compute_80")),
            ("compute_80", 90, Some("compute_80")),
            ("compute_80 compute_90", 89, Some("compute_80")),
            ("compute_80 compute_90", 90, Some("compute_90")),
            ("compute_90 compute_80", 120, Some("compute_90")),
            ("compute_90", 89, None),
            // Architecture-specific code runs on its own GPU alone.
            ("sm_90a", 90, Some("sm_90a")),
            ("sm_90 sm_90a", 90, Some("sm_90a")),
            ("sm_100a compute_100a", 103, None),
            ("sm_100a sm_100", 103, Some("sm_100")),
            ("compute_90a", 100, None),
            // Family-specific code runs on newer GPUs of its family.
            ("sm_100f", 103, Some("sm_100f")),
            ("sm_103f", 100, None),
            ("compute_100f", 103, Some("compute_100f")),
            ("compute_100f", 120, None),
        ] {
            assert_eq!(
                chosen(targets, gpu).as_deref(),
                wanted,
                "{targets} on {gpu}"
            );
        }
    }

    const TEXT: &[u8] = b".version 9.0\n.target sm_80\n.address_size 64\n";
    /// [`TEXT`] as `xz --format=lzma` packs it, with its length in the header.
    const PACKED: &[u8] =
        b"\x5d\x00\x10\x00\x00\x2c\x00\x00\x00\x00\x00\x00\x00\x00\x17\x1d\x88\xa7\x56\x23\
        \xed\x1f\x97\xde\xd1\xa2\x5f\xac\xf5\x46\xc7\x6a\x16\xc0\x11\xf6\xa8\x83\xa8\x90\
        \xec\x5f\x1a\xa2\x53\x11\xb7\x3a\x17\x66\xe2\x5b\xbe\xf9\x9a\x9b\xce\x72\xe3\xa9\
        \xfa\xdf\xfe\xad\x8c\x00";

    /// Returns the image that begins at `at` in a pack that should have `len` bytes, and ends with it.
    fn image(at: usize, len: usize, packed: &'static [u8]) -> KernelImage {
        KernelImage {
            target: target("compute_80"),
            at,
            len: len - at,
            pack: KernelPack { len, packed },
        }
    }

    #[test]
    fn unpacked_ptx_is_aligned_and_ends_with_null() {
        let unpacked = image(0, TEXT.len(), PACKED).unpack().unwrap();
        assert_eq!(unpacked.bytes().split_last().unwrap(), (&0, TEXT));
        assert!(unpacked.bytes().as_ptr().addr().is_multiple_of(IMAGE_ALIGN));
    }

    #[test]
    fn images_of_a_pack_are_unpacked_in_their_order() {
        let all = image(0, TEXT.len(), PACKED);
        let part = |at, len| KernelImage { at, len, ..all };
        let mut reader = PackReader::new(&all).unwrap();
        for (at, len) in [(0, 4), (4, 0), (9, 6), (20, TEXT.len() - 20)] {
            let unpacked = reader.unpack(&part(at, len)).unwrap();
            assert_eq!(
                unpacked.bytes().split_last().unwrap().1,
                &TEXT[at..at + len]
            );
        }
        let error = reader.unpack(&part(0, 4)).map(|_| ()).unwrap_err();
        assert!(error.message().contains("behind another"), "{error}");
    }

    #[test]
    fn image_of_another_length_is_refused() {
        let cut = &PACKED[..PACKED.len() / 2];
        for image in [
            image(0, TEXT.len() - 1, PACKED),
            image(0, TEXT.len() + 1, PACKED),
            image(9, TEXT.len() - 1, PACKED),
            image(9, TEXT.len() + 1, PACKED),
            image(TEXT.len() + 9, TEXT.len() + 9, PACKED),
            image(0, TEXT.len(), cut),
            image(0, TEXT.len(), &[]),
        ] {
            let error = image.unpack().map(|_| ()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal, "{image:?}");
            assert!(error.message().contains("compute_80"), "{error}");
        }
    }
}
