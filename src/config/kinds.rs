//! The kinds of values that settings take: how each is parsed, shown and described.

use super::Config;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

/// Result of parsing a value; the error is a phrase that follows `NAME="value": `.
pub(super) type Parsed<T> = Result<T, String>;

/// Parses, formats and describes the values of one type of setting.
pub(super) trait ValueKind {
    type Value;

    /// Describes the valid values in a phrase, for error messages and documentation.
    fn range(&self) -> String;

    /// Parses a value as users write it. The error is a phrase that follows `NAME="value": `.
    fn parse(&self, text: &str) -> Parsed<Self::Value>;

    /// Formats a value as users write it; returns an empty text for an unset value.
    fn show(&self, value: &Self::Value) -> String;

    /// Parses a value and stores it in its field of `config`.
    fn apply(
        &self,
        config: &mut Config,
        field: fn(&mut Config) -> &mut Self::Value,
        text: &str,
    ) -> Parsed<()> {
        *field(config) = self.parse(text)?;
        Ok(())
    }

    /// Formats the field of `config` that holds `value`.
    fn show_in(&self, _config: &Config, value: &Self::Value) -> String {
        self.show(value)
    }
}

/// Parses a byte count with an optional binary K, M or G.
///
/// # Errors
/// A sentence if the text is not a byte count or overflows.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let (digits, unit) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: usize = digits.parse().map_err(|_| "not a byte count".to_string())?;
    number
        .checked_mul(1 << unit)
        .ok_or_else(|| "too large".to_string())
}

/// Formats a byte count in the largest binary unit that divides it.
fn show_bytes(bytes: usize) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let fits = |&(bits, _): &(u32, &str)| bytes > 0 && bytes.is_multiple_of(1 << bits);
    match units.into_iter().find(fits) {
        Some((bits, unit)) => format!("{}{unit}", bytes >> bits),
        None => bytes.to_string(),
    }
}

fn in_range<T: PartialOrd>(value: T, low: T, high: T) -> Parsed<T> {
    match low <= value && value <= high {
        true => Ok(value),
        false => Err("out of range".into()),
    }
}

fn count(text: &str, low: usize, high: usize) -> Parsed<usize> {
    let value = text.trim().parse();
    let value = value.map_err(|_| "not a whole number".to_string())?;
    in_range(value, low, high)
}

/// Joins names as in "a, b or c".
fn one_of(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).into(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// Byte counts with three parameters: minimum, maximum, and a number of which both are multiples.
pub(super) struct ByteCount(pub usize, pub usize, pub usize);

impl ValueKind for ByteCount {
    type Value = usize;

    fn range(&self) -> String {
        let ByteCount(low, high, multiple) = *self;
        let range = format!("{} to {}", show_bytes(low), show_bytes(high));
        match multiple {
            1 => range,
            _ => format!("{range}, a multiple of {multiple}"),
        }
    }

    fn parse(&self, text: &str) -> Parsed<usize> {
        let ByteCount(low, high, multiple) = *self;
        let value = in_range(parse_bytes(text)?, low, high)?;
        match value.is_multiple_of(multiple) {
            true => Ok(value),
            false => Err(format!("not a multiple of {multiple}")),
        }
    }

    fn show(&self, value: &usize) -> String {
        value.to_string()
    }
}

/// Whole numbers with three parameters: minimum, maximum, and text that is appended to the range in
/// the description.
pub(super) struct WholeNumber<T>(pub T, pub T, pub &'static str);

impl<T: Copy + Display + TryFrom<usize>> ValueKind for WholeNumber<T>
where
    usize: TryFrom<T>,
{
    type Value = T;

    fn range(&self) -> String {
        format!("{} to {}{}", self.0, self.1, self.2)
    }

    fn parse(&self, text: &str) -> Parsed<T> {
        let [low, high] = [self.0, self.1].map(|bound| usize::try_from(bound).unwrap_or(0));
        let value = count(text, low, high)?;
        value.try_into().map_err(|_| "out of range".into())
    }

    fn show(&self, value: &T) -> String {
        value.to_string()
    }
}

/// Powers of two between a minimum and a maximum, both inclusive.
pub(super) struct PowerOfTwo(pub usize, pub usize);

impl ValueKind for PowerOfTwo {
    type Value = usize;

    fn range(&self) -> String {
        format!("a power of two from {} to {}", self.0, self.1)
    }

    fn parse(&self, text: &str) -> Parsed<usize> {
        let value = count(text, self.0, self.1)?;
        match value.is_power_of_two() {
            true => Ok(value),
            false => Err("not a power of two".into()),
        }
    }

    fn show(&self, value: &usize) -> String {
        value.to_string()
    }
}

/// A switch, written as 0 or 1.
pub(super) struct Switch;

impl ValueKind for Switch {
    type Value = bool;

    fn range(&self) -> String {
        "0 or 1".into()
    }

    fn parse(&self, text: &str) -> Parsed<bool> {
        count(text, 0, 1).map(|value| value == 1)
    }

    fn show(&self, value: &bool) -> String {
        u8::from(*value).to_string()
    }
}

/// Durations in seconds between a minimum and a maximum, both inclusive.
pub(super) struct Seconds(pub f64, pub f64);

impl ValueKind for Seconds {
    type Value = Duration;

    fn range(&self) -> String {
        format!("{} to {} seconds", self.0, self.1)
    }

    fn parse(&self, text: &str) -> Parsed<Duration> {
        let value = text.trim().parse::<f64>();
        let value = value.map_err(|_| "not a number of seconds".to_string())?;
        in_range(value, self.0, self.1).map(Duration::from_secs_f64)
    }

    fn show(&self, value: &Duration) -> String {
        value.as_secs_f64().to_string()
    }
}

/// A setting whose value is a member of the list `.0`. The function `.1` returns the name by which
/// users write a member.
pub(super) struct Member<T: 'static>(pub &'static [T], pub fn(T) -> &'static str);

impl<T: Copy + 'static> ValueKind for Member<T> {
    type Value = T;

    fn range(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|&one| (self.1)(one)).collect();
        one_of(&names)
    }

    fn parse(&self, text: &str) -> Parsed<T> {
        let mut all = self.0.iter().copied();
        let found = all.find(|&one| (self.1)(one) == text.trim());
        found.ok_or_else(|| "no such name".into())
    }

    fn show(&self, value: &T) -> String {
        (self.1)(*value).into()
    }
}

/// Words of a list in lower case; the user may write them in any case.
pub(super) struct Word(pub &'static [&'static str]);

impl ValueKind for Word {
    type Value = String;

    fn range(&self) -> String {
        one_of(self.0)
    }

    fn parse(&self, text: &str) -> Parsed<String> {
        let text = text.trim().to_ascii_lowercase();
        match self.0.contains(&text.as_str()) {
            true => Ok(text),
            false => Err("no such name".into()),
        }
    }

    fn show(&self, value: &String) -> String {
        value.clone()
    }
}

/// `auto`, which is `None`, or a value of another kind.
pub(super) struct Auto<K>(pub K);

impl<K: ValueKind> ValueKind for Auto<K> {
    type Value = Option<K::Value>;

    fn range(&self) -> String {
        let inner = self.0.range();
        let between = if inner.contains(" or ") { ", " } else { " or " };
        format!("auto{between}{inner}")
    }

    fn parse(&self, text: &str) -> Parsed<Option<K::Value>> {
        match text.trim() {
            "auto" => Ok(None),
            text => self.0.parse(text).map(Some),
        }
    }

    fn show(&self, value: &Option<K::Value>) -> String {
        let shown = value.as_ref().map(|value| self.0.show(value));
        shown.unwrap_or_else(|| "auto".into())
    }
}

/// Parses text that is not empty.
pub(super) fn non_empty(text: &str) -> Parsed<String> {
    match text.trim() {
        "" => Err("empty".into()),
        text => Ok(text.into()),
    }
}

/// Text that is not empty, `None` if unset, with a phrase that describes the text.
pub(super) struct FreeText(pub &'static str);

impl ValueKind for FreeText {
    type Value = Option<String>;

    fn range(&self) -> String {
        self.0.into()
    }

    fn parse(&self, text: &str) -> Parsed<Option<String>> {
        non_empty(text).map(Some)
    }

    fn show(&self, value: &Option<String>) -> String {
        value.clone().unwrap_or_default()
    }
}

/// Paths, `None` if unset, with a phrase that describes them.
pub(super) struct FilePath(pub &'static str);

impl ValueKind for FilePath {
    type Value = Option<PathBuf>;

    fn range(&self) -> String {
        self.0.into()
    }

    fn parse(&self, text: &str) -> Parsed<Option<PathBuf>> {
        non_empty(text).map(|path| Some(path.into()))
    }

    fn show(&self, value: &Option<PathBuf>) -> String {
        let path = value.as_ref().map(|path| path.display().to_string());
        path.unwrap_or_default()
    }
}

/// Values with a parser of their own. The first parameter describes the valid values in a phrase.
pub(super) struct Custom<T>(pub &'static str, pub fn(&str) -> Parsed<T>);

impl<T: Display> ValueKind for Custom<T> {
    type Value = T;

    fn range(&self) -> String {
        self.0.into()
    }

    fn parse(&self, text: &str) -> Parsed<T> {
        (self.1)(text)
    }

    fn show(&self, value: &T) -> String {
        value.to_string()
    }
}
