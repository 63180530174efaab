//! Reads arrays from NumPy's .npy files, versions 1 to 3, as input of a benchmark.

use cinch::DType;
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Longest header that is read, in bytes; NumPy writes 118 bytes.
const MAX_HEADER: usize = 64 << 10;

/// An array in C order.
#[derive(Debug, PartialEq)]
pub struct Array {
    /// Element type.
    pub dtype: DType,
    /// Extent of each dimension.
    pub shape: Vec<usize>,
    /// Elements in the machine's byte order.
    pub bytes: Vec<u8>,
}

impl Array {
    /// Reads a whole file.
    ///
    /// # Errors
    /// Returns an error message that names the file and the problem.
    pub fn read(path: &Path) -> Result<Array, String> {
        let name = path.display();
        let mut file = File::open(path).map_err(|error| format!("{name}: {error}"))?;
        let length = file
            .metadata()
            .map_err(|error| format!("{name}: {error}"))?
            .len();
        Array::parse(&mut file, length).map_err(|why| format!("{name}: {why}"))
    }

    /// Reads an array from a file of `length` bytes.
    ///
    /// # Errors
    /// Returns a sentence about the problem.
    pub fn parse(file: &mut impl Read, length: u64) -> Result<Array, String> {
        let mut start = [0u8; 8];
        fill(file, &mut start, "the file's first 8 bytes")?;
        if &start[..6] != b"\x93NUMPY" {
            return Err("not a .npy file: it does not begin with \\x93NUMPY".into());
        }
        let (header_length, prefix) = match start[6] {
            1 => {
                let mut two = [0u8; 2];
                fill(file, &mut two, "the header's length")?;
                (u16::from_le_bytes(two) as usize, 10)
            }
            2 | 3 => {
                let mut four = [0u8; 4];
                fill(file, &mut four, "the header's length")?;
                (u32::from_le_bytes(four) as usize, 12)
            }
            version => {
                return Err(format!(
                    ".npy version {version}; this tool reads 1, 2 and 3"
                ));
            }
        };
        if header_length > MAX_HEADER {
            return Err(format!(
                "a header of {header_length} bytes; this tool reads up to {MAX_HEADER}"
            ));
        }
        let mut header = vec![0; header_length];
        fill(file, &mut header, "the header")?;
        let header = std::str::from_utf8(&header).map_err(|_| "the header is not UTF-8")?;
        let (dtype, shape) = parse_header(header)?;
        let bytes = shape
            .iter()
            .try_fold(dtype.size(), |bytes, &extent| bytes.checked_mul(extent))
            .ok_or("the shape's product overflows")?;
        let held = length.saturating_sub((prefix + header_length) as u64);
        if bytes as u64 != held {
            return Err(format!(
                "shape {shape:?} of {dtype} is {bytes} bytes, but {held} follow the header"
            ));
        }
        let mut data = vec![0; bytes];
        fill(file, &mut data, "the data")?;
        Ok(Array {
            dtype,
            shape,
            bytes: data,
        })
    }
}

fn fill(file: &mut impl Read, buffer: &mut [u8], what: impl Display) -> Result<(), String> {
    file.read_exact(buffer)
        .map_err(|error| format!("{what}: {error}"))
}

/// Parses type and shape from a header such as `{'descr': '<f4', 'fortran_order': False, 'shape':
/// (3, 4), }`.
fn parse_header(header: &str) -> Result<(DType, Vec<usize>), String> {
    let value = |key: &str| {
        let quoted = [format!("'{key}'"), format!("\"{key}\"")];
        quoted
            .iter()
            .find_map(|quoted| header.split_once(quoted.as_str()))
            .and_then(|(_, rest)| rest.trim_start().strip_prefix(':'))
            .map(str::trim_start)
            .ok_or_else(|| format!("the header has no {key}"))
    };
    let descr = value("descr")?;
    let descr = match descr.chars().next() {
        Some(quote @ ('\'' | '"')) => descr[1..].split(quote).next().unwrap_or_default(),
        _ => return Err("records are not supported; the file must hold one plain type".into()),
    };
    let dtype = match descr {
        "<f2" => DType::F16,
        "<f4" => DType::F32,
        "<f8" => DType::F64,
        "|i1" | "<i1" => DType::I8,
        "|u1" | "<u1" => DType::U8,
        "<i4" => DType::I32,
        "<u4" => DType::U32,
        "<i8" => DType::I64,
        "<u8" => DType::U64,
        big if big.starts_with('>') => {
            return Err(format!(
                "type {big} is big-endian; save it as {}",
                big.replace('>', "<")
            ));
        }
        other => {
            return Err(format!(
                "type {other}; this tool reads <f2 <f4 <f8 |i1 |u1 <i4 <u4 <i8 <u8"
            ));
        }
    };
    if cfg!(target_endian = "big") {
        return Err("little-endian data on a big-endian machine".into());
    }
    let shape = value("shape")?
        .strip_prefix('(')
        .and_then(|rest| rest.split_once(')'))
        .map(|(inside, _)| inside)
        .ok_or("the header's shape is not a tuple")?;
    let shape = shape
        .split(',')
        .map(str::trim)
        .filter(|extent| !extent.is_empty())
        .map(|extent| {
            extent
                .trim_end_matches('L')
                .parse()
                .map_err(|_| format!("extent \"{extent}\" of the shape is not a number"))
        })
        .collect::<Result<Vec<usize>, String>>()?;
    let fortran = value("fortran_order")?;
    if fortran.starts_with("True") && shape.len() > 1 {
        return Err("Fortran order; save it with numpy.ascontiguousarray".into());
    }
    if !fortran.starts_with("True") && !fortran.starts_with("False") {
        return Err("the header's fortran_order is neither True nor False".into());
    }
    Ok((dtype, shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
        let mut file = b"\x93NUMPY".to_vec();
        file.extend([version, 0]);
        match version {
            1 => file.extend((header.len() as u16).to_le_bytes()),
            _ => file.extend((header.len() as u32).to_le_bytes()),
        }
        file.extend(header.as_bytes());
        file.extend(data);
        file
    }

    fn parse(file: &[u8]) -> Result<Array, String> {
        Array::parse(&mut &file[..], file.len() as u64)
    }

    #[test]
    fn arrays_of_each_version_and_type() {
        let data: Vec<u8> = [1.5f32, -2.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        for version in [1, 2, 3] {
            let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }  \n";
            let array = parse(&file(version, header, &data)).unwrap();
            assert_eq!(array.dtype, DType::F32);
            assert_eq!(array.shape, [2]);
            assert_eq!(array.bytes, data);
        }
        for (descr, size) in [("|u1", 1), ("|i1", 1), ("<f2", 2), ("<i4", 4), ("<f8", 8)] {
            let header =
                format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (2, 3), }}");
            let array = parse(&file(1, &header, &vec![0; 6 * size])).unwrap();
            assert_eq!(array.dtype.size(), size);
        }
        let scalar = "{'descr': '<f8', 'fortran_order': False, 'shape': (), }";
        assert!(parse(&file(1, scalar, &[0; 8])).unwrap().shape.is_empty());
        let flat = "{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }";
        assert!(parse(&file(1, flat, &[0; 4])).is_ok());
    }

    #[test]
    fn damaged_files_give_error_messages() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
        for (bytes, word) in [
            (vec![], "first 8 bytes"),
            (b"not numpy at all".to_vec(), "NUMPY"),
            (file(9, good, &[0; 8]), "version 9"),
            (file(1, good, &[0; 7]), "7 follow"),
            (file(1, good, &[0; 9]), "9 follow"),
            (file(1, &good.replace('<', ">"), &[0; 8]), "big-endian"),
            (file(1, &good.replace("f4", "c8"), &[0; 8]), "<c8"),
            (
                file(1, &good.replace("'<f4'", "[('a', '<f4')]"), &[0; 8]),
                "records",
            ),
            (file(1, &good.replace("(2,)", "(2"), &[0; 8]), "tuple"),
            (file(1, &good.replace("(2,)", "(-2,)"), &[0; 8]), "-2"),
            (file(1, &good.replace("shape", "shap"), &[0; 8]), "no shape"),
            (file(1, &good.replace("False", "Maybe"), &[0; 8]), "neither"),
            (
                file(
                    1,
                    &good.replace("(2,)", "(1, 2)").replace("False", "True"),
                    &[0; 8],
                ),
                "Fortran",
            ),
            (
                file(
                    1,
                    &good.replace("(2,)", "(9999999999, 9999999999)"),
                    &[0; 8],
                ),
                "overflows",
            ),
            (b"\x93NUMPY\x02\0\xff\xff\xff\xff".to_vec(), "4294967295"),
            (file(1, good, &[0; 8])[..30].to_vec(), "header"),
        ] {
            let error = parse(&bytes).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
