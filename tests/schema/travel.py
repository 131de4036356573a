"""The travel schema of the paper, in short, and a count of tokens that needs no model."""

from __future__ import annotations

TRAVEL = """\
<schema name="travel">
  <system>
    You are a travel planner.
  </system>
  <user>
    <module name="travel-plan">
      Plan a trip of <parameter name="duration" length="4"/>.
      <union>
        <module name="domestic">
          My eyes are set on <param name="city" len="3"/>.
        </module>
        <module name="overseas">
          I want to see other countries.
          <union>
            <module name="tokyo">Tokyo, a bustling city.</module>
            <module name="rome">Rome, the eternal city of ruins.</module>
          </union>
          Tell me about visas.
        </module>
      </union>
      Be brief.
    </module>
    <module name="budget">
      Money is short.
    </module>
  </user>
  <assistant>
    I have read about the city.
  </assistant>
  <scaffold modules="travel-plan overseas tokyo"/>
</schema>
"""
PROMPT = """\
<prompt schema="travel">
  <travel-plan duration="3 days">
    <overseas>
      <tokyo/>
    </overseas>
  </travel-plan>
  <user>
    Highlight the surf spots.
  </user>
</prompt>
"""


def words(text: str) -> int:
    return len(text.split())
