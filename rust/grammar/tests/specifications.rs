//! What is refused and how, and what is compiled in spite of its size.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use octavo_grammar::{Error, Kind, Vocabulary};
use support::{accepts, vocabulary};

/// Every one of these ends: in a grammar whose first masks can be written, or in an error that a user can read.
#[test]
fn whatever_its_size_it_ends() {
    let vocabulary = vocabulary();
    let list = |count: usize, item: &dyn Fn(usize) -> String| {
        (0..count).map(item).collect::<Vec<_>>().join(",")
    };
    let chain = |count: usize| {
        let links = list(count, &|i| {
            format!(r##""a{i}":{{"items":{{"$ref":"#/$defs/a{}"}},"type":"array"}}"##, i + 1)
        });
        format!(r##"{{"$ref":"#/$defs/a0","$defs":{{{links},"a{count}":{{"type":"null"}}}}}}"##)
    };
    let branches = list(20, &|i| {
        let branch = |name| format!(r#"{{"properties":{{"{name}{i}":{{"type":"string"}}}}}}"#);
        format!(r#"{{"anyOf":[{},{}]}}"#, branch("a"), branch("b"))
    });
    let nested = |open: &str, close: &str, count: usize| {
        format!("{}{}{}", open.repeat(count), "{}", close.repeat(count))
    };
    let patterns =
        |count| list(count, &|i| format!(r#"{{"type":"string","pattern":"a.{{{i}}}b"}}"#));
    let doubling = list(100, &|i| {
        let twice = format!(r##"{{"$ref":"#/$defs/a{}"}}"##, i + 1);
        format!(r#""a{i}":{{"allOf":[{twice},{twice}]}}"#)
    }) + r#","a100":{"pattern":"a"}"#;
    let names = |count: usize| list(count, &|i| format!("\"a{i}\":{{}}"));
    let lark_chain = list(12_000, &|i| format!("r{i}: \"a\" r{}", i + 1)).replace(',', "\n");
    let words = list(15_000, &|i| format!("\"word {}\"", i * 7919 % 20_011));
    for (kind, spec, fails) in [
        (Kind::Regex, "(a|b)*a(a|b){400}".to_owned(), false),
        (Kind::Regex, "((a{1000}){1000}){1000}".to_owned(), false),
        (Kind::Regex, "(.*a.{200}){30}".to_owned(), false),
        (Kind::Regex, "(".repeat(100_000), true),
        (Kind::Regex, "a".repeat(600_000), true),
        (Kind::Choice, format!("[{words}]"), false),
        (Kind::Choice, format!("[\"{}\"]", "x".repeat(100_000)), false),
        (Kind::Json, chain(1000), false),
        (Kind::Json, chain(4500), true),
        (Kind::Json, nested(r#"{"type":"array","items":"#, "}", 100), false),
        (Kind::Json, nested(r#"{"items":"#, "}", 10_000), true),
        (Kind::Json, format!(r#"{{"type":"object","allOf":[{branches}]}}"#), true),
        (Kind::Json, format!(r#"{{"enum":[{words}]}}"#), false),
        (Kind::Json, format!(r#"{{"type":"object","properties":{{{}}}}}"#, names(2001)), true),
        (
            Kind::Json,
            format!(r#"{{"type":"object","patternProperties":{{{}}}}}"#, names(101)),
            true,
        ),
        (Kind::Json, format!(r#"{{"type":"object","required":[{words}]}}"#), true),
        (Kind::Json, format!(r#"{{"allOf":[{}]}}"#, patterns(200)), true),
        (Kind::Grammar, format!(r#"start: %json {{"allOf":[{}]}}"#, patterns(200)), true),
        (Kind::Json, format!(r##"{{"$ref":"#/$defs/a0","$defs":{{{doubling}}}}}"##), true),
        (Kind::Json, format!(r#"{{"anyOf":[{}]}}"#, patterns(50)), false),
        (
            Kind::Json,
            format!(
                r##"{{"$defs":{{"a":{{"allOf":[{p}]}}}},"allOf":[{{"$ref":"#/$defs/a"}},{p}]}}"##,
                p = patterns(6)
            ),
            true,
        ),
        (Kind::Grammar, format!("start: X\nX: {}", vec!["/.*a.{9}b.*/"; 30].join(" & ")), true),
        // A regular expression that goes on in the next line, where it looks like a text's beginning.
        (
            Kind::Grammar,
            format!("start: X\nX: /c\n\"/ & {}", vec!["/.*a.{9}b.*/"; 30].join(" & ")),
            true,
        ),
        (
            Kind::Grammar,
            "start: \"&&&&&&&&&&&&\" /[&]{12}&/ // & & & & & & & & & & & &".to_owned(),
            false,
        ),
        (Kind::Json, r#"{"type":"integer","multipleOf":1000003}"#.to_owned(), true),
        (Kind::Json, r#"{"type":"number","multipleOf":0.0000001}"#.to_owned(), false),
        (Kind::Json, r#"{"type":"array","minItems":1000000}"#.to_owned(), false),
        (Kind::Json, r#"{"type":"string","minLength":1000000000}"#.to_owned(), false),
        (Kind::Grammar, format!("start: r0\n{lark_chain}\nr12000: \"b\""), false),
        (Kind::Grammar, format!("start: {}\"a\"{}", "(".repeat(9000), ")".repeat(9000)), true),
    ] {
        let short: String = spec.chars().take(60).collect();
        match vocabulary.compile(kind, &spec) {
            Ok(grammar) => {
                assert!(!fails, "{short}");
                grammar.matcher().mask(&mut [0; 9]).unwrap();
            }
            Err(error) => {
                assert!(fails, "{short}: {error}");
                let message = error.to_string();
                assert!(message.len() < 2000 && !message.contains("panic"), "{short}: {message}");
            }
        }
    }
}

/// The library calls itself without end over the smallest of them, which would take the process with it.
#[test]
fn numbers_are_exact_or_refused() {
    const MIN: &str = "-9223372036854775808";
    let vocabulary = vocabulary();
    let schemas = [
        format!(r#"{{"const":{MIN}}}"#),
        format!(r#"{{"enum":[1,{{"a":[{MIN}]}}]}}"#),
        format!(r#"{{"type":"integer","minimum":{MIN},"maximum":{MIN}}}"#),
        format!(r##"{{"$ref":"#/$defs","$defs":{{"const":{MIN}}}}}"##),
        format!(r##"{{"$ref":"#/$defs","$defs":{{"enum":[{MIN}]}}}}"##),
        format!(r#"{{"properties":{{"const":{{"const":{MIN}}}}}}}"#),
        r#"{"const":1234567890123456789}"#.to_owned(),
        r#"{"type":"integer","const":1e30}"#.to_owned(),
        r#"{"type":"integer","minimum":1e30,"maximum":1e31}"#.to_owned(),
        r#"{"type":"integer","minimum":-1e19,"maximum":-1e19}"#.to_owned(),
        r#"{"allOf":[{"multipleOf":65536},{"multipleOf":65537}]}"#.to_owned(),
        r##"{"$ref":"#/$defs/a","multipleOf":70000,"$defs":{"a":{"multipleOf":70000}}}"##
            .to_owned(),
        r#"{"allOf":[{"multipleOf":1e-10},{"multipleOf":3}]}"#.to_owned(),
    ];
    for schema in schemas {
        assert!(vocabulary.compile(Kind::Json, &schema).is_err(), "{schema}");
        let lark = format!("start: %json {schema}");
        assert!(vocabulary.compile(Kind::Grammar, &lark).is_err(), "{schema}");
    }
    let any = format!(r#"{{"type":"integer","minimum":{MIN},"maximum":9223372036854775807}}"#);
    for (schema, text, valid) in [
        (any.as_str(), "-9223372036854774784", true),
        (&any, "9223372036854774784", true),
        (&any, "9223372036854775808", false),
        (r#"{"type":"integer","minimum":9007199254740993}"#, "9007199254740992", false),
        (r#"{"type":"integer","minimum":9007199254740993}"#, "9007199254740994", true),
        (r#"{"type":"integer","maximum":-9007199254740995}"#, "-9007199254740994", false),
        (r#"{"type":"integer","maximum":-9007199254740995}"#, "-9007199254740996", true),
        (r#"{"const":1234567890123456768}"#, "1234567890123456768", true),
        (r#"{"properties":{"maximum":{"maximum":9}}}"#, r#"{"maximum":8}"#, true),
        (r#"{"allOf":[{"multipleOf":3},{"multipleOf":0.5}]}"#, "6", true),
        (r#"{"allOf":[{"multipleOf":3},{"multipleOf":0.5}]}"#, "4.5", false),
    ] {
        assert_eq!(accepts(&vocabulary, Kind::Json, schema, text), valid, "{schema} {text}");
    }
}

/// What is compiled can be followed, too.
#[test]
fn objects_of_many_properties() {
    let vocabulary = vocabulary();
    let schema = |count: usize, required: usize| {
        let list = |count, item: &dyn Fn(usize) -> String| {
            (0..count).map(item).collect::<Vec<_>>().join(",")
        };
        let properties = list(count, &|i| format!(r#""a{i}":{{"const":1}}"#));
        let required = list(required, &|i| format!("\"a{}\"", count - 1 - i));
        format!(
            r#"{{"properties":{{{properties}}},"required":[{required}],"additionalProperties":true}}"#
        )
    };
    assert!(vocabulary.compile(Kind::Json, &schema(2000, 1549)).is_err());
    let yes = |schema: &str, text: &str| assert!(accepts(&vocabulary, Kind::Json, schema, text));
    yes(&schema(450, 0), r#"{"a0":1,"a7":1,"a449":1,"b":2}"#);
    yes(&schema(450, 0), r#"{"b":2}"#);
    let required = (450..2000).map(|i| format!("\"a{i}\":1")).collect::<Vec<_>>().join(",");
    yes(&schema(2000, 1550), &format!(r#"{{"a3":1,{required},"b":2}}"#));
}

/// Their values are listed before any limit is met: there may be 2^64 of them.
#[test]
fn rules_with_parameters_are_refused() {
    let vocabulary = vocabulary();
    for grammar in [
        "start: a::0x0\na::_: b a::incr(_) | \"x\"\nb: \"y\" | \"\"",
        "start: \"a long beginning\" a::0x0\na::_: a::incr(_) \"z\" | \"x\"",
        "start: /c\n\"/ a::0x0\na::_: a::incr(_) \"z\" | \"x\"",
        "start: %lark {\nstart: a::0x0\na::_: a::incr(_) \"z\" | \"x\"\n}",
    ] {
        let Err(error) = vocabulary.compile(Kind::Grammar, grammar) else { panic!("{grammar}") };
        assert!(error.to_string().contains("parameters"), "{error}");
    }
    let text = "start: \"a::b\" /::/ \"c\" // start: a::_\n# a::_";
    assert!(accepts(&vocabulary, Kind::Grammar, text, "a::b::c"));
}

#[test]
fn a_wrong_regular_expression_is_shown_as_it_was_written() {
    let Err(error) = vocabulary().compile(Kind::Regex, "[0-9") else { panic!("it has no end") };
    let expected = "the regular expression is not valid: unclosed character class\n    [0-9\n    ^";
    assert_eq!(error.to_string(), expected);
}

/// Who writes down an answer's fields means these, each once.
#[test]
fn objects_that_name_their_properties_have_no_others() {
    let vocabulary = vocabulary();
    let person =
        r#"{"properties":{"name":{"type":"string"},"age":{"type":"integer"}},"required":["name"]}"#;
    let list =
        format!(r##"{{"type":"array","items":{{"$ref":"#/$defs/P"}},"$defs":{{"P":{person}}}}}"##);
    for (schema, text, valid) in [
        (person, r#"{"name":"Ada","age":36}"#, true),
        (person, r#"{"name":"Ada"}"#, true),
        (person, r#"{"name":"Ada","city":"London"}"#, false),
        (person, r#"{"name":"Ada","name":"Ada"}"#, false),
        (&list, r#"[{"name":"Ada"},{"name":"Alan","age":41}]"#, true),
        (&list, r#"[{"name":"Ada","x":1}]"#, false),
    ] {
        assert_eq!(accepts(&vocabulary, Kind::Json, schema, text), valid, "{schema} {text}");
    }
}

/// A name that is spelled with an escape is the same name.
#[test]
fn names_are_told_apart_by_what_they_say() {
    let vocabulary = vocabulary();
    let open = r#"{"properties":{"a":{"type":"integer"},"\u00e9":{"type":"integer"}},"additionalProperties":{}}"#;
    let either = r#"{"properties":{"a":{"type":"integer"},"b":{}},"anyOf":[{"required":["a"]},{"required":["b"]}]}"#;
    let both = r#"{"allOf":[{"properties":{"a":{"type":"integer"}}},{"additionalProperties":{"type":"string"}}]}"#;
    let closed = r#"{"allOf":[{"properties":{"a":{}}},{"properties":{"b":{}},"additionalProperties":false}]}"#;
    let data = r#"{"const":{"properties":{"a":1}}}"#;
    let inner = r#"{"properties":{"properties":{"properties":{"a":{"type":"integer"}},"additionalProperties":true}},"additionalProperties":true}"#;
    for (schema, text, valid) in [
        (open, r#"{"\u0061":"x"}"#, false),
        (open, r#"{"\u00e9":"x"}"#, false),
        (open, r#"{"a":"x"}"#, false),
        (open, r#"{"a":1,"é":2,"ü":"x","\n\"":[]}"#, true),
        (open, "7", true),
        (either, r#"{"b":1,"c":"x"}"#, true),
        (either, r#"{"c":"x"}"#, false),
        (both, r#"{"x":"s"}"#, true),
        (both, r#"{"x":1}"#, false),
        (closed, r#"{"b":1}"#, true),
        (closed, r#"{"c":1}"#, false),
        (data, r#"{"properties":{"a":1}}"#, true),
        (inner, r#"{"properties":{"\u0061":"x"}}"#, false),
        (inner, r#"{"properties":{"a":3,"z":1},"q":1}"#, true),
    ] {
        let found = accepts(&vocabulary, Kind::Json, schema, text);
        assert_eq!(found, valid, "{schema} {text}");
    }
}

#[test]
fn grammars_cannot_ask_for_bytes_that_are_no_text() {
    let vocabulary = vocabulary();
    for option in ["allow_invalid_utf8", r"allow_\u0069nvalid_utf8"] {
        let grammar = format!("%llguidance {{\"{option}\": true}}\nstart: /[\\x80-\\xff]/");
        let Err(error) = vocabulary.compile(Kind::Grammar, &grammar) else { panic!("{option}") };
        assert!(error.to_string().contains("answers are text"), "{error}");
    }
    assert!(vocabulary.compile(Kind::Regex, r"(?-u)\xff").is_err());
}

#[test]
fn a_regular_expression_is_whole() {
    let vocabulary = vocabulary();
    for (pattern, text) in [(r"a\\", r"a\"), ("a/b\\/", "a/b/"), ("a\\\n", "a\n"), (r"[\\]", "\\")]
    {
        assert!(accepts(&vocabulary, Kind::Regex, pattern, text), "{pattern}");
    }
    for pattern in ["\\", r"a\", r"a\\\", "a(", "[a", "a**)"] {
        assert!(vocabulary.compile(Kind::Regex, pattern).is_err(), "{pattern}");
    }
}

#[test]
fn grammars_are_kept_by_kind_and_text() {
    let vocabulary = vocabulary();
    let first = vocabulary.compile(Kind::Regex, "ab").unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &vocabulary.compile(Kind::Regex, "ab").unwrap()));
    vocabulary.compile(Kind::Choice, "[\"ab\"]").unwrap();
    assert!(vocabulary.compile(Kind::Regex, "a(").is_err());
    assert_eq!(vocabulary.cached(), 2);
    for number in 0..100 {
        vocabulary.compile(Kind::Regex, &format!("a{{{number}}}b")).unwrap();
    }
    assert_eq!(vocabulary.cached(), 64);
    assert!(!std::sync::Arc::ptr_eq(&first, &vocabulary.compile(Kind::Regex, "ab").unwrap()));
    // A long specification drives out many short ones.
    for _ in 0..4 {
        let long = serde_json::to_string(&["x".repeat(250_000)]).unwrap();
        vocabulary.compile(Kind::Choice, &long).unwrap();
    }
    assert!(vocabulary.cached() > 1);
}

#[test]
fn vocabularies_without_an_end_are_refused() {
    let words = || vec![b"a".to_vec(), b"b".to_vec()];
    for eos in [&[][..], &[2]] {
        let made = Vocabulary::new(words(), |_| false, eos, false);
        assert!(matches!(made, Err(Error::Vocabulary(message)) if message.contains("end token")));
    }
    assert!(Vocabulary::new(Vec::new(), |_| false, &[0], false).is_err());
    // Tokens longer than the trie is deep are left out.
    let long = vec![b"a".to_vec(), vec![b'a'; 5000], vec![b'a'; 1000], b"<end>".to_vec()];
    let vocabulary = Vocabulary::new(long, |_| false, &[3], false).unwrap();
    let mut row = [0];
    vocabulary.compile(Kind::Regex, "a+").unwrap().matcher().mask(&mut row).unwrap();
    assert_eq!(row, [0b101]);
}

/// Such a string's lexer has states for each place in it, more than are kept: it is made anew on the way.
#[test]
fn a_long_string_is_followed_to_its_bound() {
    const LONG: usize = 30_000;
    let schema = format!(r#"{{"type":"string","maxLength":{LONG},"minLength":{LONG}}}"#);
    let mut matcher = vocabulary().compile(Kind::Json, &schema).unwrap().matcher();
    let mut row = [0; 9];
    matcher.advance(b'"'.into()).unwrap();
    let mut usual = None;
    for place in 0..LONG {
        matcher.mask(&mut row).unwrap();
        assert_eq!(*usual.get_or_insert(row), row, "after {place} characters");
        matcher.advance(u32::from(b'a') + place as u32 % 26).unwrap();
    }
    matcher.mask(&mut row).unwrap();
    assert_eq!(row.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
    assert_eq!(row[b'"' as usize / 32] >> (b'"' % 32) & 1, 1);
}
