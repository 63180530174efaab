//! Draws line charts as SVG: panels one above the other with a common logarithmic horizontal axis,
//! and a legend.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

/// A line of a chart.
pub struct Series {
    /// Name in the legend. Lines with the same name have the same colour in all panels.
    pub name: String,
    /// Whether the line is dashed instead of solid.
    pub dashed: bool,
    /// Points, each with horizontal position and value.
    pub points: Vec<(f64, f64)>,
}

/// A chart of several lines.
pub struct Panel {
    /// Label of the vertical axis, with its unit.
    pub label: String,
    /// Whether the vertical axis is logarithmic. Values of 0 or less are then left out.
    pub logarithmic: bool,
    /// The lines of the panel.
    pub series: Vec<Series>,
}

impl Panel {
    /// Returns whether the vertical axis can show a value.
    fn shows(&self, y: f64) -> bool {
        let low = if self.logarithmic { 1e-15 } else { 0.0 };
        (low..=1e15).contains(&y)
    }
}

const WIDTH: u32 = 860;
const TITLE_HEIGHT: u32 = 60;
const PANEL_HEIGHT: u32 = 300;
const LEGEND_ROW: u32 = 20;

/// The "bright" colours of Paul Tol, which colour-blind readers can tell apart.
const COLORS: [u32; 7] = [
    0x4477aa, 0xee6677, 0x228833, 0xaa3377, 0x66a0cc, 0xb8860b, 0x777777,
];

type DrawArea<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Draws panels as an SVG; `across` is the label of the horizontal axis.
pub fn svg(across: &str, title: &str, subtitle: &str, panels: &[Panel]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for series in panels.iter().flat_map(|panel| &panel.series) {
        if !names.contains(&series.name.as_str()) {
            names.push(&series.name);
        }
    }
    let charts = PANEL_HEIGHT * panels.len() as u32;
    let legend = LEGEND_ROW * names.len().div_ceil(2) as u32 + 12;
    let mut out = String::new();
    let backend = SVGBackend::with_string(&mut out, (WIDTH, TITLE_HEIGHT + charts + legend));
    let drawn = draw(
        &backend.into_drawing_area(),
        across,
        [title, subtitle],
        panels,
        &names,
    );
    // Writing to a string cannot fail.
    debug_assert!(drawn.is_ok(), "{drawn:?}");
    out
}

fn draw(
    root: &DrawArea<'_>,
    across: &str,
    [title, subtitle]: [&str; 2],
    panels: &[Panel],
    names: &[&str],
) -> Drawn {
    root.fill(&WHITE)?;
    root.draw(&Text::new(printable(title), (80, 10), ("sans-serif", 18)))?;
    root.draw(&Text::new(
        printable(subtitle),
        (80, 36),
        ("sans-serif", 12),
    ))?;
    let (_, rest) = root.split_vertically(TITLE_HEIGHT);
    let (charts, legend) = rest.split_vertically(PANEL_HEIGHT * panels.len() as u32);
    let points = panels.iter().flat_map(|panel| &panel.series);
    let (low, high) =
        range(points.flat_map(|series| series.points.iter().map(|point| point.0.max(1.0))));
    let x = (low, high.max(2.0 * low));
    for (area, panel) in charts.split_evenly((panels.len(), 1)).iter().zip(panels) {
        let shown = panel.series.iter().flat_map(|series| &series.points);
        let values = shown.map(|point| point.1);
        let values = values.filter(|&y| panel.shows(y));
        let (low, high) = range(values);
        match panel.logarithmic {
            true => chart(
                area,
                panel,
                (x, across),
                (low / 1.5..high * 1.5).log_scale(),
                names,
            )?,
            false => chart(area, panel, (x, across), 0.0..high.max(1e-9) * 1.05, names)?,
        }
    }
    for (index, name) in names.iter().enumerate() {
        let left = 80 + (index as i32 % 2) * (WIDTH as i32 - 100) / 2;
        let top = (index as u32 / 2 * LEGEND_ROW) as i32;
        let dashed = panels.iter().flat_map(|panel| &panel.series);
        let dashed = dashed
            .into_iter()
            .any(|series| series.name == *name && series.dashed);
        let right = left + if dashed { 14 } else { 28 };
        let line = [(left, top + 8), (right, top + 8)];
        legend.draw(&PathElement::new(line, color(index).stroke_width(2)))?;
        legend.draw(&Text::new(
            printable(name),
            (left + 36, top),
            ("sans-serif", 12),
        ))?;
    }
    root.present()?;
    Ok(())
}

fn chart<Y>(
    area: &DrawArea<'_>,
    panel: &Panel,
    ((low, high), across): ((f64, f64), &str),
    y: Y,
    names: &[&str],
) -> Drawn
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .x_label_area_size(42)
        .y_label_area_size(70)
        .build_cartesian_2d((low..high).log_scale().base(2.0), y)?;
    chart
        .configure_mesh()
        .x_desc(across)
        .y_desc(printable(&panel.label))
        .x_label_formatter(&|&x| size_label(x))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for series in &panel.series {
        let index = names.iter().position(|name| *name == series.name);
        let style = color(index.unwrap_or(0)).stroke_width(2);
        let shown = series.points.iter().filter(|point| panel.shows(point.1));
        let points: Vec<(f64, f64)> = shown.copied().collect();
        let points = points.into_iter().map(|(x, y)| (x.max(1.0), y));
        match series.dashed {
            true => chart.draw_series(DashedLineSeries::new(points.clone(), 6, 4, style))?,
            false => chart.draw_series(LineSeries::new(points.clone(), style))?,
        };
        chart.draw_series(points.map(|point| Circle::new(point, 3, style)))?;
    }
    Ok(())
}

/// Returns the smallest and largest value, or 1 and 2 if there are none.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let both = values.fold(None, |both: Option<(f64, f64)>, value| {
        let (low, high) = both.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    });
    both.unwrap_or((1.0, 2.0))
}

/// Formats a size with a binary unit.
fn size_label(size: f64) -> String {
    let unit = (size.max(1.0).log2() / 10.0 + 1e-9).floor().min(4.0);
    let number = size / 1024f64.powf(unit);
    let digits = usize::from(number.fract() > 0.05);
    format!(
        "{number:.digits$}{}",
        ["", "K", "M", "G", "T"][unit as usize]
    )
}

fn color(index: usize) -> RGBColor {
    let [_, red, green, blue] = COLORS[index % COLORS.len()].to_be_bytes();
    RGBColor(red, green, blue)
}

/// Replaces control characters, which XML 1.0 forbids, by spaces.
fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(logarithmic: bool, values: &[f64]) -> Panel {
        let size = |(i, &value): (usize, &f64)| (1024.0 * 2f64.powi(i as i32), value);
        Panel {
            label: "a < b & \"c\"".into(),
            logarithmic,
            series: [false, true]
                .into_iter()
                .map(|dashed| Series {
                    name: format!("f32 <sum> {dashed}"),
                    dashed,
                    points: values.iter().enumerate().map(size).collect(),
                })
                .collect(),
        }
    }

    /// Checks that tags nest, attributes are quoted and text is escaped. Returns the number of each
    /// element.
    fn check_xml(text: &str) -> std::collections::HashMap<String, usize> {
        let (mut open, mut seen) = (Vec::new(), std::collections::HashMap::new());
        let mut rest = text.trim_end();
        while let Some((before, tag)) = rest.split_once('<') {
            assert!(!before.contains('>'), "stray > in {before:?}");
            for (at, _) in before.match_indices('&') {
                let entity = before[at + 1..].split(';').next().unwrap();
                let known = ["amp", "lt", "gt", "quot", "apos", "#39"];
                assert!(known.contains(&entity), "&{entity}");
            }
            let (tag, after) = tag.split_once('>').expect("an open tag");
            rest = after;
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.split([' ', '/']).next().unwrap().to_string();
            *seen.entry(name.clone()).or_default() += 1;
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert!(open.is_empty() && rest.is_empty(), "{open:?} {rest:?}");
        assert!(!text.contains("NaN") && !text.contains("inf"));
        seen
    }

    #[test]
    fn drawing_is_well_formed_and_has_every_point() {
        let panels = [
            panel(false, &[0.5, 1.0, 3.7]),
            panel(true, &[1e-3, 2e-2, 0.0]),
        ];
        let title = "4 ranks & <more>";
        let drawing = svg("message size (bytes)", title, "\u{1b}[0m \"here\"", &panels);
        let seen = check_xml(&drawing);
        // The logarithmic panel cannot show the point with value 0.
        assert_eq!(seen["circle"], 2 * 3 + 2 * 2);
        assert!(drawing.contains("message size (bytes)"));
    }

    #[test]
    fn drawing_survives_odd_values() {
        for values in [
            &[][..],
            &[0.0],
            &[1.0],
            &[f64::NAN, f64::INFINITY, -1.0],
            &[1e-300, 1e300],
        ] {
            check_xml(&svg(
                "",
                "",
                "",
                &[panel(false, values), panel(true, values)],
            ));
        }
        check_xml(&svg("", "", "", &[]));
    }

    #[test]
    fn size_labels_have_binary_units() {
        for (size, label) in [
            (1.0, "1"),
            (1024.0, "1K"),
            (1048576.0, "1M"),
            (1536.0, "1.5K"),
        ] {
            assert_eq!(size_label(size), label);
        }
    }
}
