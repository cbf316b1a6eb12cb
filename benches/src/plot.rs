//! Line plots as SVG, without any library.

use std::fmt::Write;

/// One line of a plot.
pub(crate) struct Series {
    /// Those of one name have one colour, and one line in the legend.
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) dashed: bool,
}

/// A plot with logarithmic axes.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x_label: &'static str,
    pub(crate) y_label: &'static str,
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 15.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
const LEGEND_LINE: f64 = 18.0;
/// Distinguishable also with the common kinds of colour blindness (Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442"];

/// Draws the panels side by side, with one legend below.
pub(crate) fn svg(panels: &[Panel]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for series in panels.iter().flat_map(|panel| &panel.series) {
        if !names.contains(&series.name.as_str()) {
            names.push(&series.name);
        }
    }
    let columns = u32::try_from(panels.len()).map_or(1.0, f64::from).max(1.0);
    let rows = u32::try_from(names.len()).map_or(0.0, f64::from);
    let (width, height) = (WIDTH * columns, HEIGHT + rows * LEGEND_LINE + 10.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut left = 0.0;
    for panel in panels {
        draw_panel(&mut out, panel, left, &names);
        left += WIDTH;
    }
    let mut y = HEIGHT + 5.0;
    for (index, name) in names.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        put(
            &mut out,
            format_args!("<rect x=\"{LEFT}\" y=\"{y}\" width=\"20\" height=\"4\" fill=\"{colour}\"/>"),
        );
        text(&mut out, LEFT + 28.0, y + 6.0, "start", name);
        y += LEGEND_LINE;
    }
    out.push_str("</svg>\n");
    out
}

/// A logarithmic axis between whole powers of ten's 1, 2 and 5.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    fn around(values: impl Iterator<Item = f64> + Clone) -> Self {
        let positive = values.filter(|value| *value > 0.0);
        let low = positive.clone().fold(f64::INFINITY, f64::min);
        let high = positive.fold(0.0, f64::max);
        if low > high {
            return Self { low: 1.0, high: 10.0 };
        }
        let below = Self::ticks_from(low / 10.0).take_while(|tick| *tick <= low).last().unwrap_or(low);
        let above = Self::ticks_from(high).find(|tick| *tick >= high).unwrap_or(high);
        Self { low: below, high: if above > below { above } else { below * 10.0 } }
    }

    fn ticks_from(low: f64) -> impl Iterator<Item = f64> {
        let power = 10_f64.powf(low.log10().floor());
        (0..20)
            .flat_map(move |decade| [1.0, 2.0, 5.0].map(move |step| step * power * 10_f64.powi(decade)))
            .filter(move |tick| *tick >= low * 0.999)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        let high = self.high;
        Self::ticks_from(self.low).take_while(move |tick| *tick <= high * 1.001)
    }

    /// Where a value lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        (value.log10() - self.low.log10()) / (self.high.log10() - self.low.log10())
    }
}

fn draw_panel(out: &mut String, panel: &Panel, left: f64, names: &[&str]) {
    let points = panel.series.iter().flat_map(|series| &series.points);
    let (x, y) =
        (Axis::around(points.clone().map(|point| point.0)), Axis::around(points.map(|point| point.1)));
    let (inner_width, inner_height) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let place_x = |value| left + LEFT + x.place(value) * inner_width;
    let place_y = |value| TOP + (1.0 - y.place(value)) * inner_height;
    let (x_first, x_last, y_first, y_last) = (left + LEFT, left + WIDTH - RIGHT, TOP, HEIGHT - BOTTOM);
    text(out, f64::midpoint(x_first, x_last), TOP - 15.0, "middle", &panel.title);
    text(out, f64::midpoint(x_first, x_last), HEIGHT - 12.0, "middle", panel.x_label);
    let middle = f64::midpoint(y_first, y_last);
    let label_x = left + 14.0;
    put(
        out,
        format_args!(
            "<text x=\"{label_x}\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 {label_x} {middle})\">{}</text>",
            panel.y_label
        ),
    );
    for tick in x.ticks() {
        let at = place_x(tick);
        line(out, (at, y_first), (at, y_last), "#dddddd");
        text(out, at, y_last + 16.0, "middle", &number(tick));
    }
    for tick in y.ticks() {
        let at = place_y(tick);
        line(out, (x_first, at), (x_last, at), "#dddddd");
        text(out, x_first - 6.0, at + 4.0, "end", &number(tick));
    }
    for series in &panel.series {
        let index = names.iter().position(|name| *name == series.name).unwrap_or(0);
        let colour = COLOURS[index % COLOURS.len()];
        let mut path = String::new();
        for (at_x, at_y) in series.points.iter().filter(|point| point.0 > 0.0 && point.1 > 0.0) {
            let (at_x, at_y) = (place_x(*at_x), place_y(*at_y));
            put(&mut path, format_args!("{at_x:.1},{at_y:.1} "));
            put(out, format_args!("<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"3\" fill=\"{colour}\"/>"));
        }
        let path = path.replace('\n', "");
        let dash = if series.dashed { " stroke-dasharray=\"4 3\"" } else { "" };
        put(
            out,
            format_args!(
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{dash}/>"
            ),
        );
    }
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    put(
        out,
        format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        ),
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    put(out, format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
}

fn put(out: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{what}");
}

/// As short as it can be said.
fn number(value: f64) -> String {
    // Longer ones would run into the axis' title.
    match value {
        1e6.. => format!("{} M", value / 1e6),
        1e4.. => format!("{} k", value / 1e3),
        1.0.. => format!("{value:.0}"),
        _ => format!("{value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_drawn_with_ticks_and_a_legend() {
        let series =
            Series { dashed: false, name: "a < b".to_owned(), points: vec![(1.0, 70.0), (14.0, 600.0)] };
        let panel = Panel { title: "t".to_owned(), x_label: "x", y_label: "y", series: vec![series] };
        let svg = svg(&[panel]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        for expected in ["a &lt; b", ">20<", ">1000<", "polyline"] {
            assert!(svg.contains(expected), "{expected}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn ticks_are_short() {
        let shown: Vec<String> = [0.5, 2.0, 5000.0, 20_000.0, 500_000.0, 2e6].map(number).into();
        assert_eq!(shown, ["0.5", "2", "5000", "20 k", "500 k", "2 M"]);
    }

    #[test]
    fn a_plot_of_nothing_is_drawn_too() {
        let panel = Panel { title: "t".to_owned(), x_label: "x", y_label: "y", series: Vec::new() };
        assert!(!svg(&[panel]).contains("NaN"));
    }
}
