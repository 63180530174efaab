//! `ncclConfigExt_t`: options of one call that belong to a vendor's library.
//!
//! NVIDIA's library ignores them all, so that a program which sets a codec still runs there, without
//! compression.

use cinch::config::call_codec;
use cinch::types::{CodecKind, CodecSpec, ScaleRule};
use cinch::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};

/// `key.vendorId` of cinch's options, which follow below.
pub const VENDOR_ID: c_int = 0xC14C48;
/// `key.optionId` for a codec's name in `val.s`, with parameters as in `linear8:block=128`, or
/// `off`.
pub const OPTION_CODEC: c_int = 1;
/// `key.optionId` for the number of elements that share a scale, in `val.i`. It applies to the
/// codec of [`OPTION_CODEC`].
pub const OPTION_BLOCK: c_int = 2;
/// `key.optionId` that turns compression off for the call if `val.i` is 1, whatever else is set; 0 has no
/// effect.
pub const OPTION_OFF: c_int = 3;

/// The struct `ncclConfigExt_t` of nccl.h: one option in a linked list.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ncclConfigExt_t {
    /// The next option, or NULL.
    pub next: *const ncclConfigExt_t,
    /// Key of the option.
    pub key: OptionKey,
    /// Value of the option.
    pub val: OptionValue,
}

/// The type of `ncclConfigExt_t.key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct OptionKey {
    /// Vendor of the option.
    pub vendorId: c_int,
    /// Number of the option among the vendor's options.
    pub optionId: c_int,
}

/// The type of `ncclConfigExt_t.val`.
#[derive(Clone, Copy)]
#[repr(C)]
pub union OptionValue {
    /// Value of an option whose type is an integer.
    pub i: c_int,
    /// Value of an option whose type is a string: NUL-terminated text.
    pub s: *const c_char,
    /// A pointer to any other value.
    pub raw: *mut c_void,
}

/// Largest number of options in a list. A longer list is taken for a circle.
const MAX_OPTIONS: usize = 4096;

/// Returns the codec that the options of a call set; `None` if they set none.
///
/// # Errors
/// Invalid argument for an option of cinch that is unknown, repeated or out of range.
///
/// # Safety
/// `first` is NULL, or the first of a list that ends, with valid strings.
pub(crate) unsafe fn codec(first: *const ncclConfigExt_t) -> Result<Option<CodecSpec>> {
    let mut seen: Vec<c_int> = Vec::new();
    let (mut named, mut block, mut off): (Option<CodecSpec>, Option<c_int>, bool) =
        (None, None, false);
    let mut at = first;
    for _ in 0..MAX_OPTIONS {
        if at.is_null() {
            return resolve(named, block, off);
        }
        // SAFETY: the caller passes a list of readable options, and `at` is not NULL.
        let option = unsafe { at.read_unaligned() };
        at = option.next;
        if option.key.vendorId != VENDOR_ID {
            continue;
        }
        let id = option.key.optionId;
        if seen.contains(&id) {
            return Err(wrong(format!("option {id} is repeated")));
        }
        seen.push(id);
        match id {
            // SAFETY: nccl.h requires of the program that the value of this option is a string.
            OPTION_CODEC => named = unsafe { text(option.val.s)?.map(call_codec).transpose()? },
            // SAFETY: any bits are a valid integer, whichever field the program set.
            OPTION_BLOCK => block = Some(unsafe { option.val.i }),
            // SAFETY: any bits are a valid integer, whichever field the program set.
            OPTION_OFF => match unsafe { option.val.i } {
                0 => {}
                1 => off = true,
                other => return Err(wrong(format!("OPTION_OFF is {other}; it takes 0 or 1"))),
            },
            _ => {
                return Err(wrong(format!(
                    "option {id} is unknown; valid: {OPTION_CODEC} (codec), {OPTION_BLOCK} \
                     (block) and {OPTION_OFF} (off)"
                )));
            }
        }
    }
    Err(wrong(format!(
        "the list has more than {MAX_OPTIONS} options, or no end"
    )))
}

/// Returns the codec that the three options of a call select together.
fn resolve(named: Option<CodecSpec>, block: Option<c_int>, off: bool) -> Result<Option<CodecSpec>> {
    let Some(block) = block else {
        return Ok(if off { Some(CodecSpec::RAW) } else { named });
    };
    let Some(named) = named else {
        return Err(wrong(format!(
            "OPTION_BLOCK is {block}, and no OPTION_CODEC names a codec"
        )));
    };
    let kind: CodecKind = named.kind;
    if !matches!(named.scale, ScaleRule::Block(_)) || !kind.has_scale() {
        return Err(wrong(format!(
            "OPTION_BLOCK is {block}, and codec {named} has no blocks"
        )));
    }
    // Parsing the name together with the block size checks the block size.
    let spec: CodecSpec = format!("{}:block={block}", kind.name()).parse()?;
    let spec = CodecSpec {
        scale: spec.scale,
        ..named
    };
    Ok(Some(if off { CodecSpec::RAW } else { spec }))
}

/// Returns the value of [`OPTION_CODEC`].
///
/// # Safety
/// `text` is NULL or a valid string.
unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Err(wrong("OPTION_CODEC is NULL".into()));
    }
    // SAFETY: the caller passes a valid string, as `text` is not NULL.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map(Some)
        .map_err(|_| wrong("OPTION_CODEC is not UTF-8".into()))
}

fn wrong(why: String) -> Error {
    Error::invalid_argument(format!(
        "ncclCollConfig_t.ext of vendor {VENDOR_ID:#x}: {why}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a list of options, given as vendor, number and value.
    fn read(options: &[(c_int, c_int, OptionValue)]) -> Result<Option<CodecSpec>> {
        let mut list: Vec<ncclConfigExt_t> = options
            .iter()
            .map(|&(vendorId, optionId, val)| ncclConfigExt_t {
                next: std::ptr::null(),
                key: OptionKey { vendorId, optionId },
                val,
            })
            .collect();
        for at in (1..list.len()).rev() {
            list[at - 1].next = &list[at];
        }
        // SAFETY: the list of this test ends, and its strings are static.
        unsafe { codec(list.first().map_or(std::ptr::null(), std::ptr::from_ref)) }
    }

    const fn named(name: &'static CStr) -> (c_int, c_int, OptionValue) {
        (VENDOR_ID, OPTION_CODEC, OptionValue { s: name.as_ptr() })
    }
    const fn number(option: c_int, i: c_int) -> (c_int, c_int, OptionValue) {
        (VENDOR_ID, option, OptionValue { i })
    }

    #[test]
    fn options_set_codec() {
        assert_eq!((size_of::<ncclConfigExt_t>(), VENDOR_ID >> 24), (24, 0));
        assert_eq!(read(&[]).unwrap(), None);
        let spec = read(&[named(c"linear8")]).unwrap().unwrap();
        assert_eq!(spec.to_string(), "linear8:block=256");
        assert_eq!(read(&[named(c"off")]).unwrap(), Some(CodecSpec::RAW));
        let spec = read(&[number(OPTION_BLOCK, 64), named(c"dynamic8")]);
        assert_eq!(spec.unwrap().unwrap().to_string(), "dynamic8:block=64");
        let spec = read(&[named(c"linear8"), number(OPTION_OFF, 1)]);
        assert_eq!(spec.unwrap(), Some(CodecSpec::RAW));
        assert_eq!(read(&[number(OPTION_OFF, 0)]).unwrap(), None);
        // Tests that options of other vendors are ignored.
        let other = (77, OPTION_CODEC, OptionValue { i: 5 });
        assert_eq!(read(&[other, other]).unwrap(), None);
    }

    #[test]
    fn wrong_option_is_refused() {
        for (options, said) in [
            (vec![named(c"linear9")], "linear9"),
            (vec![named(c"auto:linear8")], "auto"),
            (vec![named(c"raw"), named(c"raw")], "is repeated"),
            (vec![number(9, 0)], "option 9 is unknown"),
            (vec![number(OPTION_OFF, 2)], "it takes 0 or 1"),
            (vec![number(OPTION_BLOCK, 64)], "no OPTION_CODEC"),
            (
                vec![named(c"cast16"), number(OPTION_BLOCK, 64)],
                "has no blocks",
            ),
            (
                vec![named(c"linear8"), number(OPTION_BLOCK, 63)],
                "block=63",
            ),
            (
                vec![(
                    VENDOR_ID,
                    OPTION_CODEC,
                    OptionValue {
                        s: std::ptr::null(),
                    },
                )],
                "is NULL",
            ),
        ] {
            let error = read(&options).unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
        let mut circle = ncclConfigExt_t {
            next: std::ptr::null(),
            key: OptionKey {
                vendorId: 77,
                optionId: 0,
            },
            val: OptionValue { i: 0 },
        };
        circle.next = &circle;
        // SAFETY: `codec` stops after `MAX_OPTIONS`; the one option of the list is valid.
        let error = unsafe { codec(&circle) }.unwrap_err();
        assert!(error.message().contains("no end"), "{error}");
    }
}
