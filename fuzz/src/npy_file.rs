//! NumPy's .npy files, which the tool reads.

use super::input::Input;
use super::npy::Array;

/// Parses a file whose length is known, or given wrongly by the first two bytes.
pub fn npy(data: &[u8]) -> Option<bool> {
    let mut input = Input(data);
    let lie = input.u8();
    let length = match lie {
        0 => input.0.len() as u64,
        lie => u64::from(lie) << (lie % 57),
    };
    let array = Array::parse(&mut input.0, length).ok()?;
    let elements: usize = array.shape.iter().product();
    assert_eq!(array.bytes.len(), elements * array.dtype.size());
    use cinch::DType::{F16, F32, I64, U8};
    Some(!matches!(array.dtype, F16 | F32 | I64 | U8))
}
