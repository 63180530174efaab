//! What a shared object exports, as far as telling one library from another takes.

/// Bytes of a section header and of a symbol of 64-bit ELF.
const HEADER: usize = 64;
const SYMBOL: usize = 24;

/// `SHT_DYNSYM`: the symbols that the loader sees.
const DYNAMIC_SYMBOLS: u32 = 11;

/// Whether `file`, a 64-bit little-endian ELF object, defines `name` for others.
pub fn exports(file: &[u8], name: &str) -> bool {
    file.starts_with(b"\x7fELF\x02\x01") && find(file, name).unwrap_or(false)
}

/// `None` where the file ends too early.
fn find(file: &[u8], name: &str) -> Option<bool> {
    let section = |index: usize| {
        let at = word(file, 0x28)?.checked_add(index.checked_mul(HEADER)?)?;
        file.get(at..at.checked_add(HEADER)?)
    };
    let content = |header: &[u8]| {
        let at = word(header, 24)?;
        file.get(at..at.checked_add(word(header, 32)?)?)
    };
    for index in 0..usize::from(u16::from_le_bytes(array(file, 0x3c)?)) {
        let header = section(index)?;
        if u32::from_le_bytes(array(header, 4)?) != DYNAMIC_SYMBOLS {
            continue;
        }
        let strings = content(section(u32::from_le_bytes(array(header, 40)?) as usize)?)?;
        for symbol in content(header)?.chunks_exact(SYMBOL) {
            let at = u32::from_le_bytes(array(symbol, 0)?) as usize;
            // Of section 0 is what the object takes from others.
            let defined = u16::from_le_bytes(array(symbol, 6)?) != 0;
            let text = strings.get(at..)?.split(|&byte| byte == 0).next()?;
            if defined && text == name.as_bytes() {
                return Some(true);
            }
        }
    }
    Some(false)
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(array(bytes, at)?)).ok()
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}
