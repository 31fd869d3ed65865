//! The chart: time of one call over the size of its value, puts above, gets below, both axes logarithmic.
//!
//! Written as text: the style sheet inside asks the reader's page for light or dark, which plotting libraries do not do,
//! and every line is labelled where it begins, with labels pushed apart.

use std::fmt::Write;

use crate::{
    job::{Op, Shape},
    report::{Figures, Report, short},
};

const WIDTH: f64 = 1090.0;
const HEAD: f64 = 74.0;
const PANEL: f64 = 430.0;
const FOOT: f64 = 44.0;
/// Of a panel: where the plot lies in it.
const LEFT: f64 = 370.0;
const RIGHT: f64 = WIDTH - 64.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = PANEL - 34.0;
/// The least distance of two labels.
const LINE: f64 = 16.0;

const STYLE: &str = "\
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 18px; font-weight: 600; }
.head { font-size: 14px; font-weight: 600; }
.note { font-size: 12px; fill: #59636e; }
.grid { stroke: #d1d9e0; stroke-width: 1; }
.series { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.own { stroke-width: 3.4; }
.own-label { font-weight: 700; }
.spread { stroke-width: 1; }
.leader { fill: none; stroke-width: 0.8; opacity: 0.6; }
.no-copy { stroke-dasharray: 6 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .note { fill: #9198a1; }
  .grid { stroke: #3d444d; }
}
";

/// The lines of the chart: peer and colour. The colours stand out on white and on near-black.
const PEERS: [(&str, &str); 9] = [
    ("memcpy", "#808890"),
    ("floor: futex", "#a38a2c"),
    ("haulier", "#e8590c"),
    ("haulier, in process", "#d6748f"),
    ("mooncake, registered once", "#3b82d6"),
    ("mooncake, light client", "#29a3b8"),
    ("nixl", "#a561d1"),
    ("redis", "#e0413a"),
    ("memcached", "#2f9e54"),
];

struct Series {
    label: String,
    colour: &'static str,
    own: bool,
    no_copy: bool,
    points: Vec<(usize, Figures)>,
}

/// The whole chart.
pub fn draw(report: &Report) -> String {
    let height = HEAD + 2.0 * PANEL + FOOT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>Time of one call over the size of its value</title>\n<style>\n{STYLE}</style>\n"
    );
    text(&mut svg, 16.0, 28.0, "title", "Haulier beside other stores: time of one call");
    let how = "medians; bars: quartiles; dashed: no copy is made; lower is better; both axes logarithmic";
    text(&mut svg, 16.0, 50.0, "note", how);
    panel(&mut svg, report, HEAD, "put", [Op::Put, Op::PutInPlace]);
    panel(&mut svg, report, HEAD + PANEL, "get", [Op::GetInto, Op::View]);
    let machine = format!("{}; peers interleaved in one run", report.machine);
    text(&mut svg, 16.0, height - 16.0, "note", &machine);
    svg.push_str("</svg>\n");
    svg
}

fn series(report: &Report, [copy, no_copy]: [Op; 2]) -> Vec<Series> {
    let mut all = Vec::new();
    for (peer, colour) in PEERS {
        for op in [copy, no_copy] {
            let sizes = report.shapes().into_iter().filter(|shape| shape.values == 1);
            let points: Vec<(usize, Figures)> = sizes
                .filter_map(|shape: Shape| Some((shape.bytes, report.figures(peer, op, shape)?)))
                .collect();
            if points.is_empty() {
                continue;
            }
            let what = if op == copy { String::new() } else { format!(", {}", op.label().replace('_', " ")) };
            let (own, no_copy) = (peer.starts_with("haulier"), op == no_copy);
            all.push(Series { label: format!("{peer}{what}"), colour, own, no_copy, points });
        }
    }
    all
}

fn panel(svg: &mut String, report: &Report, at: f64, title: &str, ops: [Op; 2]) {
    let all = series(report, ops);
    let sizes: Vec<f64> = all.iter().flat_map(|line| &line.points).map(|(bytes, _)| *bytes as f64).collect();
    let times: Vec<f64> =
        all.iter().flat_map(|line| &line.points).flat_map(|(_, of)| [of.p25_us, of.p75_us]).collect();
    let (Some(x), Some(y)) =
        (Scale::over(&sizes, LEFT, RIGHT), Scale::decades(&times, at + BOTTOM, at + TOP))
    else {
        return text(svg, 16.0, at + 20.0, "note", &format!("{title}: nothing was measured"));
    };
    text(svg, 16.0, at + 20.0, "head", title);
    for decade in y.ticks() {
        let (place, time) = (y.place(decade), duration(decade));
        let _ = writeln!(svg, "<path class=\"grid\" d=\"M{LEFT:.1} {place:.1}H{RIGHT:.1}\"/>");
        text(svg, RIGHT + 10.0, place + 4.0, "note", &time);
    }
    for shape in report.shapes().into_iter().filter(|shape| shape.values == 1) {
        let place = x.place(shape.bytes as f64);
        let _ = writeln!(svg, "<path class=\"grid\" d=\"M{place:.1} {:.1}V{:.1}\"/>", at + TOP, at + BOTTOM);
        let _ = writeln!(
            svg,
            "<text class=\"note\" text-anchor=\"middle\" x=\"{place:.1}\" y=\"{:.1}\">{shape}</text>",
            at + BOTTOM + 18.0
        );
    }
    let wanted: Vec<f64> = all.iter().map(|line| y.place(line.points[0].1.median_us)).collect();
    let labels = apart(&wanted, at + TOP, at + BOTTOM);
    for (line, label) in all.iter().zip(labels) {
        draw_series(svg, line, &x, &y, label);
    }
}

fn draw_series(svg: &mut String, line: &Series, x: &Scale, y: &Scale, label: f64) {
    let Series { colour, own, no_copy, points, .. } = line;
    let place = |(bytes, of): &(usize, Figures)| (x.place(*bytes as f64), y.place(of.median_us));
    let path: Vec<String> = points.iter().map(place).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let class = format!("series{}{}", if *own { " own" } else { "" }, if *no_copy { " no-copy" } else { "" });
    let _ = writeln!(svg, "<path class=\"{class}\" stroke=\"{colour}\" d=\"M{}\"/>", path.join("L"));
    for (point, (_, of)) in points.iter().map(place).zip(points) {
        let (low, high) = (y.place(of.p25_us), y.place(of.p75_us));
        let _ = writeln!(
            svg,
            "<path class=\"spread\" stroke=\"{colour}\" d=\"M{:.1} {low:.1}V{high:.1}\"/>\
             <circle fill=\"{colour}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.6\"/>",
            point.0, point.0, point.1
        );
    }
    let (start_x, start_y) = place(&points[0]);
    let _ = writeln!(
        svg,
        "<path class=\"leader\" stroke=\"{colour}\" d=\"M{:.1} {label:.1}L{:.1} {label:.1}L{start_x:.1} {start_y:.1}\"/>",
        LEFT - 44.0,
        LEFT - 34.0
    );
    let class = if *own { "own-label" } else { "" };
    let _ = writeln!(
        svg,
        "<text class=\"{class}\" style=\"fill: {colour}\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{} {}</text>",
        LEFT - 48.0,
        label + 4.0,
        escaped(&line.label),
        duration(points[0].1.median_us)
    );
}

/// Places that are in the same order, at least a line apart where there is room, and near to where they were wanted.
fn apart(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut places = wanted.to_vec();
    let mut least = top;
    for &n in &order {
        places[n] = places[n].max(least);
        least = places[n] + LINE;
    }
    let mut most = bottom;
    for &n in order.iter().rev() {
        places[n] = places[n].min(most);
        most = places[n] - LINE;
    }
    places
}

/// A logarithmic axis.
struct Scale {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Scale {
    fn over(values: &[f64], start: f64, end: f64) -> Option<Self> {
        let positive = || values.iter().copied().filter(|value| *value > 0.0);
        let from = positive().reduce(f64::min)?.log10();
        let to = positive().reduce(f64::max)?.log10();
        Some(Scale { from, to, start, end })
    }

    fn decades(values: &[f64], start: f64, end: f64) -> Option<Self> {
        let over = Self::over(values, start, end)?;
        let from = over.from.floor();
        Some(Scale { from, to: over.to.ceil().max(from + 1.0), ..over })
    }

    fn place(&self, value: f64) -> f64 {
        let part =
            if self.to > self.from { (value.log10() - self.from) / (self.to - self.from) } else { 0.5 };
        self.start + part.clamp(0.0, 1.0) * (self.end - self.start)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.from as i32..=self.to as i32).map(|power| 10_f64.powi(power))
    }
}

fn duration(us: f64) -> String {
    match us {
        us if us < 0.999 => format!("{} ns", trimmed(us * 1e3)),
        us if us < 999.5 => format!("{} µs", trimmed(us)),
        us if us < 999_500.0 => format!("{} ms", trimmed(us / 1e3)),
        us => format!("{} s", trimmed(us / 1e6)),
    }
}

/// Two or three digits, without zeros behind the point.
fn trimmed(number: f64) -> String {
    let text = if number < 10.0 { format!("{number:.1}") } else { short(number.round()) };
    let text = text.strip_suffix(".0").unwrap_or(&text);
    text.to_owned()
}

fn text(svg: &mut String, x: f64, y: f64, class: &str, words: &str) {
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(words));
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn every_measured_series_is_drawn_and_labelled() {
        let svg = draw(&sample());
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        for label in
            [">memcpy 4 µs<", ">haulier 6 µs<", ">haulier, put in place 1 µs<", ">get: nothing was measured<"]
        {
            assert!(svg.contains(label), "{label} in {svg}");
        }
        assert!(!svg.contains("redis"), "what failed has no line: {svg}");
        assert_eq!(svg.matches("class=\"series").count(), 3);
        assert_eq!(svg.matches("no-copy\" stroke").count(), 1);
        assert!(svg.contains("prefers-color-scheme: dark"));
        // As many ends as beginnings, and nothing that would end a document early.
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_tenfold_time_is_one_decade_higher() {
        let y = Scale::decades(&[2.0, 300.0], 100.0, 0.0).unwrap();
        assert_eq!(y.ticks().collect::<Vec<_>>(), [1.0, 10.0, 100.0, 1000.0]);
        assert!((y.place(10.0) - y.place(100.0) - 100.0 / 3.0).abs() < 1e-9);
        assert_eq!((y.place(1.0), y.place(1000.0)), (100.0, 0.0));
        assert!(Scale::decades(&[], 0.0, 1.0).is_none());
    }

    #[test]
    fn labels_keep_their_order_and_do_not_touch() {
        let places = apart(&[50.0, 10.0, 51.0, 99.0, 98.0], 0.0, 100.0);
        let mut sorted = places.clone();
        sorted.sort_by(f64::total_cmp);
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] >= LINE - 1e-9), "{places:?}");
        assert!(
            places[1] < places[0] && places[0] < places[2] && places[2] < places[4] && places[4] < places[3]
        );
        assert!(sorted[0] >= 0.0 && sorted[4] <= 100.0);
    }

    #[test]
    fn times_are_written_in_the_unit_that_fits() {
        let written = [0.04, 1.0, 12.34, 150.0, 20_600.0, 1_500_000.0].map(duration);
        assert_eq!(written, ["40 ns", "1 µs", "12 µs", "150 µs", "21 ms", "1.5 s"]);
    }
}
