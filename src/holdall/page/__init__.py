"""Pages: one self-contained HTML file from what was measured; no requests, no frameworks, light and dark.

file -> jsonlines -> recording | results | buffer_results -> *_page -> areas, bars, cards -> markup -> document

Everything here formats what it is given. Invariant: text becomes markup only through `markup.tag`, which escapes it.
"""
