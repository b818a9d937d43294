"""Commands of the wide-area network: proxies between sites, admission of bandwidth."""
