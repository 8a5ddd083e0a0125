import pytest

from server.media_url import MediaUrl, MediaUrlError, parse_allowed_host, parse_media_url, resolve_redirect

BAD_URLS = {
    "userinfo": "http://user:password@images.example/x.png",
    "backslash before userinfo": "http://images.example\\@127.0.0.1/x.png",
    "encoded userinfo": "http://images.example%40127.0.0.1/x.png",
    "backslash in the path": "http://images.example/\\..\\x.png",
    "space": "http://images.example/a b.png",
    "line break": "http://images.example/\r\nhost: evil",
    "tab": "http://images\t.example/",
    "null": "http://images.example/\0",
    "trailing dot": "http://localhost./x.png",
    "empty host": "http:///x.png",
    "no slashes": "http:images.example/x.png",
    "decimal": "http://2130706433/",
    "hexadecimal": "http://0x7f000001/",
    "hexadecimal parts": "http://0x7f.0.0.0x1/",
    "octal": "http://0177.0.0.1/",
    "short": "http://127.1/",
    "four parts too large": "http://300.0.0.1/",
    "other scheme": "ftp://images.example/x.png",
    "file": "file:///etc/passwd",
    "file in capitals": "FILE:///etc/passwd",
    "gopher": "gopher://images.example:70/_x",
    "scheme relative": "//images.example/x.png",
    "port zero": "http://images.example:0/",
    "port too large": "http://images.example:65536/",
    "port no number": "http://images.example:80a/",
    "zone": "http://[fe80::1%25eth0]/",
    "open bracket": "http://[::1/",
    "letters beyond ascii": "http://ⓛocalhost/",
    "fullwidth dot": "http://127。0。0。1/",
    "empty label": "http://images..example/",
    "too long": "http://images.example/" + "a" * 5000,
}


@pytest.mark.parametrize("name", BAD_URLS)
def test_urls_that_mean_two_things_are_refused(name: str) -> None:
    with pytest.raises(MediaUrlError) as caught:
        parse_media_url(BAD_URLS[name])
    assert "127" not in str(caught.value)
    assert "passw" not in str(caught.value)


def test_parts_of_a_url() -> None:
    assert parse_media_url("HTTPS://Images.Example/A/b.png?x=1&y=%20#top") == MediaUrl(
        scheme="https", host="images.example", port=443, target="/A/b.png?x=1&y=%20"
    )
    assert parse_media_url("http://images.example:8080?q").target == "/?q"
    assert parse_media_url("http://images.example:8080").host_header == "images.example:8080"
    assert parse_media_url("http://images.example/ä.png").target == "/%C3%A4.png"
    assert parse_media_url("http://[2001:DB8::1]:81/").host_header == "[2001:db8::1]:81"


def test_allowed_hosts() -> None:
    def is_allowed(entry: str, url: str) -> bool:
        return parse_allowed_host(entry).allows(parse_media_url(url))

    assert is_allowed("img.example", "https://IMG.example/x")
    assert not is_allowed("img.example", "https://a.img.example/x")
    assert not is_allowed("img.example", "https://img.example.evil/x")
    assert not is_allowed("img.example", "https://notimg.example/x")
    assert not is_allowed("img.example", "https://img.example:8443/x")
    assert is_allowed("img.example:8443", "https://img.example:8443/x")
    assert not is_allowed("img.example:8443", "https://img.example/x")
    assert is_allowed("*.img.example", "https://a.b.img.example/x")
    assert not is_allowed("*.img.example", "https://img.example/x")
    assert is_allowed("*", "http://anything.example/x")
    assert not is_allowed("*", "http://anything.example:22/x")
    assert is_allowed("[2001:db8::1]:81", "http://[2001:DB8:0::1]:81/x")


@pytest.mark.parametrize("entry", ["", "http://img.example", "img.example/x", "a b", "*img.example", "img.*", "127.1"])
def test_entries_that_are_no_hosts(entry: str) -> None:
    with pytest.raises(MediaUrlError):
        parse_allowed_host(entry)


def test_redirects() -> None:
    start = parse_media_url("https://img.example:8443/a/b.png?x")
    assert resolve_redirect(start, "/c.png").target == "/c.png"
    assert resolve_redirect(start, "/c.png").port == 8443
    assert resolve_redirect(start, "//cdn.example/c.png").host == "cdn.example"
    assert resolve_redirect(start, "https://cdn.example/c.png").scheme == "https"
    for location in ("http://img.example/c.png", "", "c.png", "file:///etc/passwd", "/\\evil", "//u@cdn.example/"):
        with pytest.raises(MediaUrlError):
            resolve_redirect(start, location)
