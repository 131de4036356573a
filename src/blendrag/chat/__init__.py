"""What a chat model says, and what it must say.

``formats`` chooses the form in which a model writes reasoning and tool calls by the markup of its chat
template, ``reply`` takes an answer apart while it grows, ``calls`` reads the text of a call, ``forcing``
begins a call that must be made, and ``grammar`` keeps an answer in a form. ``messages`` reads what clients
send back, and ``history`` fits it to what the template accepts.
"""
