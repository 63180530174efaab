//! Little-endian fields of control frames. Reading never trusts a length.

use crate::error::{Error, ErrorKind, Result};

/// Appends fields.
#[derive(Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u8(&mut self, value: u8) -> &mut Writer {
        self.0.push(value);
        self
    }

    pub(super) fn u16(&mut self, value: u16) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Text with its length; text beyond 64 KiB is cut at a character.
    pub(super) fn text(&mut self, text: &str) -> &mut Writer {
        let mut cut = text.len().min(usize::from(u16::MAX));
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        self.u16(cut as u16).bytes(&text.as_bytes()[..cut])
    }
}

/// Takes fields off the front.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk().ok_or_else(damaged)?;
        self.0 = rest;
        Ok(*front)
    }

    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count).ok_or_else(damaged)?;
        self.0 = rest;
        Ok(front)
    }

    pub(super) fn text(&mut self) -> Result<String> {
        let count = self.u16()?;
        let bytes = self.bytes(count.into())?;
        String::from_utf8(bytes.to_vec()).map_err(|_| damaged())
    }

    /// Checks that nothing is left.
    pub(super) fn end(&self) -> Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(damaged())
        }
    }
}

/// The error of a frame whose fields do not fit.
pub(super) fn damaged() -> Error {
    Error::new(
        ErrorKind::Remote,
        "a control frame is shorter or longer than its fields",
    )
}

/// Error kinds as they travel. Numbers are never reused.
const KINDS: [(u8, ErrorKind); 9] = [
    (1, ErrorKind::InvalidArgument),
    (2, ErrorKind::InvalidUsage),
    (3, ErrorKind::System),
    (4, ErrorKind::Remote),
    (5, ErrorKind::Mismatch),
    (6, ErrorKind::Timeout),
    (7, ErrorKind::Aborted),
    (8, ErrorKind::Unsupported),
    (9, ErrorKind::Internal),
];

/// An error as a frame body.
pub(super) fn write_error(error: &Error) -> Vec<u8> {
    let number = KINDS.iter().find(|(_, kind)| *kind == error.kind());
    let mut writer = Writer::default();
    writer
        .u8(number.map_or(9, |(number, _)| *number))
        .text(error.message());
    writer.0
}

/// The error in a frame body.
pub(super) fn read_error(body: &[u8]) -> Result<Error> {
    let mut reader = Reader(body);
    let number = reader.u8()?;
    let kind = KINDS.iter().find(|(known, _)| *known == number);
    let error = Error::new(
        kind.map_or(ErrorKind::Internal, |(_, kind)| *kind),
        reader.text()?,
    );
    reader.end()?;
    Ok(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_kind_and_text() {
        for (_, kind) in KINDS {
            let error = Error::new(kind, "rank 3 (host ü, pid 4) said so");
            assert_eq!(read_error(&write_error(&error)).unwrap(), error);
        }
        let long = Error::internal("ü".repeat(40_000));
        let back = read_error(&write_error(&long)).unwrap();
        assert_eq!(back.message().len(), 65_534);
    }

    #[test]
    fn lengths_are_not_trusted() {
        assert!(Reader(&[255, 255, 1]).text().is_err());
        assert!(Reader(&[1, 0, 0xff]).text().is_err());
        assert!(Reader(&[0; 3]).u32().is_err());
        assert!(Reader(&[0; 3]).bytes(usize::MAX).is_err());
        assert!(read_error(&[4, 0, 0, 9]).is_err());
    }
}
