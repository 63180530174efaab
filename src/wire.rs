//! Little-endian fields of messages between ranks. All frames are read and written by this module.
//!
//! A reader never trusts a length from the wire. A message that is shorter or longer than its fields is
//! [`Damaged`].

use crate::error::{Error, ErrorKind};

/// The error for a message that is too short or too long for its fields, or holds an invalid value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damaged;

/// Result of reading a message.
pub(crate) type WireResult<T> = std::result::Result<T, Damaged>;

impl From<Damaged> for Error {
    fn from(_: Damaged) -> Error {
        Error::new(
            ErrorKind::Remote,
            "a control frame is shorter or longer than its fields",
        )
    }
}

/// A value with a wire format.
pub(crate) trait Wire: Sized {
    /// Appends the value to the message.
    fn write(&self, writer: &mut Writer);

    /// Reads the value from the front of the message and advances past it.
    fn read(reader: &mut Reader<'_>) -> WireResult<Self>;

    /// Returns the value as a whole message.
    fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        self.write(&mut writer);
        writer.0
    }

    /// Reads the value from a whole message.
    fn from_bytes(bytes: &[u8]) -> WireResult<Self> {
        let mut reader = Reader(bytes);
        let value = Self::read(&mut reader)?;
        reader.end()?;
        Ok(value)
    }
}

/// Appends fields to a message.
#[derive(Default)]
pub(crate) struct Writer(pub Vec<u8>);

impl Writer {
    /// Appends one field in the encoding of its type.
    pub fn put<T: Wire>(&mut self, value: &T) -> &mut Writer {
        value.write(self);
        self
    }

    /// Appends bytes without a length in front.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends text with its length in front. Text beyond 64 KiB is cut between two characters.
    pub fn text(&mut self, text: &str) -> &mut Writer {
        let mut cut = text.len().min(usize::from(u16::MAX));
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        self.u16(cut as u16).bytes(&text.as_bytes()[..cut])
    }
}

/// Reads fields from the front of a message, one after the other.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Reads the next field.
    pub fn take<T: Wire>(&mut self) -> WireResult<T> {
        T::read(self)
    }

    /// Reads text that has its length in front.
    pub fn text(&mut self) -> WireResult<String> {
        let count = self.u16()?;
        let bytes = self.bytes(count.into())?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Damaged)
    }

    /// Reads the next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> WireResult<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count).ok_or(Damaged)?;
        self.0 = rest;
        Ok(front)
    }

    /// Returns an error if bytes are left behind the last field.
    pub fn end(&self) -> WireResult<()> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(Damaged),
        }
    }
}

macro_rules! wire_integers {
    ($($type:ident)*) => {
        impl Writer {
            $(
                /// Appends an integer, little endian.
                pub fn $type(&mut self, value: $type) -> &mut Writer {
                    self.bytes(&value.to_le_bytes())
                }
            )*
        }

        impl Reader<'_> {
            $(
                /// Reads the next field as an integer, little endian.
                pub fn $type(&mut self) -> WireResult<$type> {
                    let (front, rest) = self.0.split_first_chunk().ok_or(Damaged)?;
                    self.0 = rest;
                    Ok($type::from_le_bytes(*front))
                }
            )*
        }

        $(
            impl Wire for $type {
                fn write(&self, writer: &mut Writer) {
                    writer.$type(*self);
                }

                fn read(reader: &mut Reader<'_>) -> WireResult<$type> {
                    reader.$type()
                }
            }
        )*
    };
}

wire_integers!(u8 u16 u32 u64);

impl Wire for () {
    fn write(&self, _: &mut Writer) {}

    fn read(_: &mut Reader<'_>) -> WireResult<()> {
        Ok(())
    }
}

impl Wire for bool {
    fn write(&self, writer: &mut Writer) {
        writer.u8(u8::from(*self));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<bool> {
        match reader.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Damaged),
        }
    }
}

impl<T: Wire + Copy + Default, const N: usize> Wire for [T; N] {
    fn write(&self, writer: &mut Writer) {
        self.iter().for_each(|item| item.write(writer));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<[T; N]> {
        let mut array = [T::default(); N];
        for item in &mut array {
            *item = reader.take()?;
        }
        Ok(array)
    }
}

impl Wire for String {
    fn write(&self, writer: &mut Writer) {
        writer.text(self);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<String> {
        reader.text()
    }
}

impl Wire for Vec<u8> {
    fn write(&self, writer: &mut Writer) {
        writer.u32(self.len() as u32).bytes(self);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<Vec<u8>> {
        let count = reader.u32()? as usize;
        reader.bytes(count).map(<[u8]>::to_vec)
    }
}

impl<T: Wire> Wire for Option<T> {
    fn write(&self, writer: &mut Writer) {
        self.is_some().write(writer);
        self.iter().for_each(|value| value.write(writer));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<Option<T>> {
        let is_some: bool = reader.take()?;
        is_some.then(|| reader.take()).transpose()
    }
}

/// Numbers of error kinds on the wire. Never reuse a number.
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

impl Wire for Error {
    fn write(&self, writer: &mut Writer) {
        let number = KINDS.iter().find(|(_, kind)| *kind == self.kind());
        writer.u8(number.map_or(9, |(number, _)| *number));
        writer.text(self.message());
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<Error> {
        let number = reader.u8()?;
        let kind = KINDS.iter().find(|(known, _)| *known == number);
        let kind = kind.map_or(ErrorKind::Internal, |(_, kind)| *kind);
        Ok(Error::new(kind, reader.text()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_kind_and_text() {
        for (_, kind) in KINDS {
            let error = Error::new(kind, "rank 3 (host ü, pid 4) failed");
            assert_eq!(Error::from_bytes(&error.to_bytes()).unwrap(), error);
        }
        let long = Error::internal("ü".repeat(40_000));
        let back = Error::from_bytes(&long.to_bytes()).unwrap();
        assert_eq!(back.message().len(), 65_534);
    }

    #[test]
    fn lengths_beyond_the_message_are_refused() {
        assert!(Reader(&[255, 255, 1]).text().is_err());
        assert!(Reader(&[1, 0, 0xff]).text().is_err());
        assert!(Reader(&[255, 255, 255, 255, 1]).take::<Vec<u8>>().is_err());
        assert!(Reader(&[0; 3]).u32().is_err());
        assert!(Reader(&[0; 7]).take::<[u16; 4]>().is_err());
        assert!(Reader(&[0; 3]).bytes(usize::MAX).is_err());
        assert!(Error::from_bytes(&[4, 0, 0, 9]).is_err());
        assert!(Option::<u8>::from_bytes(&[2, 0]).is_err());
    }
}
