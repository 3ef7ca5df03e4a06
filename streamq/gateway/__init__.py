"""The gateway: workers and loaders in any language, over HTTP.

An HTTP request is called a call here: a request is what users submit.
"""
